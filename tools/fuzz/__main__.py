"""Draw training programs, run each resident and streamed, and report how they ended.

    python -m tools.fuzz --minutes 60 --seed 1

Exit code: 0 if each program ended in equal bits or in an error before a wrong update, else 1.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tools.fuzz import campaign


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tools.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the same one draws the same programs")
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    options = parser.parse_args(argv)
    tally = campaign.fuzz(options.minutes, options.seed)
    Console().print(campaign.render(tally))
    if options.out is not None:
        campaign.write(tally, options.out)
    return int(bool(tally.ends["failed"]))


if __name__ == "__main__":
    sys.exit(main())
