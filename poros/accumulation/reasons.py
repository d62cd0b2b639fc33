"""Why micro-batches cannot go together, and how code is stopped that runs ahead."""

OTHER_VALUES = (
    "expected a loss that calls the model with the same values each time it is computed for a "
    "micro-batch, found others (a loss that draws from a generator of its own, that takes the next "
    "batch by itself, or a trainer that gives the model other batches than it was handed?). Call "
    "backward for each micro-batch, without poros.accumulate or block-major trainers"
)


class NotGrouped(BaseException):
    """These micro-batches have to run one after the other; says why.

    Passes through code of users and of models, which catch errors at times: so it is none.

    Attributes:
        may_pass: Whether later ones may well go together.
    """

    def __init__(self, reason: str, *, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class Stopped(BaseException):
    """The model's code is as far as it is wanted: at the last layer, or at the loss."""
