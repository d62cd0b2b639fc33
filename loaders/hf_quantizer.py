"""Has transformers load a model whose tensors go through a ``SlabWriter``.

transformers' own loading decides everything: names, conversions, dtypes, what is tied, what is
missing. It has one place where a tensor, renamed and converted, passes through code of a
quantization method before the model gets it, one tensor at a time. So a method of our own is known
to it for the time of the call, under a name that only this call knows.

The method derives from bitsandbytes' 4-bit one, or from none for dense weights; afterwards nothing
of it is left on the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.quantization_config import (
    BitsAndBytesConfig,
    QuantizationConfigMixin,
    QuantizationMethod,
)

from poros.kernels.nf4 import Format, is_params4bit, own, parts_of, places
from poros.loaders.settings import describe_error
from poros.loaders.slab_writer import SlabWriter


class LoadAborted(BaseException):
    """Carries an error of ours through transformers, which would collect an ``Exception``.

    Args:
        error: What ``reading_into`` raises in its place.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def reading_into(
    writer: SlabWriter,
    config: BitsAndBytesConfig | None,
    *,
    is_quantized: bool = False,
) -> Iterator[QuantizationConfigMixin]:
    """Make ``writer`` known to transformers inside the body.

    Args:
        writer: Its ``plan`` is called with the model on the meta device, and then ``write``,
            ``quantize`` or ``copy`` for each tensor of a layer.
        config: Of the 4-bit weights; None loads dense weights.
        is_quantized: Whether the checkpoint holds 4-bit weights already.

    Yields:
        What to pass to ``from_pretrained`` as ``quantization_config``. Call ``clean`` with the
        model that it returns.

    Raises:
        CheckpointFormatError, HostMemoryError, UnsupportedModelError: The writer's, as they are.
    """
    method = f"poros-{id(writer):x}"
    kind: Any = _Dense if config is None else _Quantizing

    def make(settings: QuantizationConfigMixin, **_: Any) -> HfQuantizer:
        quantizer: HfQuantizer = kind(writer, settings, is_quantized)
        return quantizer

    quantization = config or QuantizationConfigMixin(quant_method=method)
    quantization.quant_method = method
    AUTO_QUANTIZER_MAPPING[method] = make
    failure: Exception | None = None
    try:
        yield quantization
    except LoadAborted as aborted:
        failure, aborted.error, aborted.__cause__ = aborted.error, None, None  # type: ignore[assignment]
    finally:
        del AUTO_QUANTIZER_MAPPING[method]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # it refers to this frame, which would keep all that was loaded


def clean(model: Any) -> None:
    """Leave on the model what ``from_pretrained`` without a slab writer would have left."""
    ours = model.hf_quantizer
    if ours._writer.gives_all:
        # Nothing was converted; without this, save_pretrained would not convert back either.
        del model._weight_conversions
    if isinstance(ours, _Dense):
        del model.hf_quantizer
        del model.config.quantization_config
        return
    plain = Bnb4BitHfQuantizer(ours.quantization_config, pre_quantized=ours.pre_quantized)
    for conversion in getattr(model, "_weight_conversions", None) or ():
        operations = getattr(conversion, "operations", None)
        if operations and any(isinstance(operation, _Deserialize) for operation in operations):
            conversion.operations = [operation.inner for operation in operations]
            for operation in conversion.operations:
                operation.hf_quantizer = plain
    del ours._writer, ours._dtype
    plain.__dict__ |= vars(ours)
    model.hf_quantizer = plain


class _Receiving:
    """The base of the quantization methods."""

    _writer: SlabWriter
    _dtype: torch.dtype

    def _plan(self, model: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._writer.plan(model, model._get_dtype_plan(dtype))

    def _is_placed(self, model: Any, name: str) -> bool:
        """Whether a dense tensor is written without conversion.

        Not one that keeps a dtype of its own, which transformers would cast to the dtype to load
        in first.
        """
        return self._writer.gives_all or (
            self._writer.has_place(name, self._dtype)
            and model.get_parameter_or_buffer(name).dtype == self._dtype
        )

    def update_weight_conversions(self, conversions: list[Any], *model: Any) -> list[Any]:
        if self._writer.gives_all:
            return []  # by the model's own names
        # transformers 5.17 does not give the model.
        updated: list[Any] = super().update_weight_conversions(conversions, *model)  # type: ignore[misc]
        return updated

    def get_quantize_ops(self) -> ConversionOps:
        return _Write(self._writer)


class _Dense(_Receiving, HfQuantizer):
    """No quantization: tensors of the layers are written to their places."""

    def __init__(
        self, writer: SlabWriter, config: QuantizationConfigMixin, is_quantized: bool
    ) -> None:
        super().__init__(config, pre_quantized=is_quantized)
        self._writer = writer

    def preprocess_model(self, model: Any, dtype: Any = None, **_: Any) -> None:
        # Without the marks of a quantized model that the base class would put on it.
        self._plan(model, dtype)

    def postprocess_model(self, model: Any, **_: Any) -> Any:
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return self._is_placed(model, param_name)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantizing(_Receiving, Bnb4BitHfQuantizer):
    """4-bit weights are quantized to their places, dense ones are written to theirs.

    Those that the checkpoint has in 4 bit already are written as they are.
    """

    def __init__(self, writer: SlabWriter, config: BitsAndBytesConfig, is_quantized: bool) -> None:
        super().__init__(config, pre_quantized=is_quantized)
        config.quant_method = QuantizationMethod.BITS_AND_BYTES
        self._writer = writer

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        super().preprocess_model(model, dtype=dtype, **kwargs)
        self._plan(model, dtype)

    def _process_model_before_weight_loading(self, model: Any, *_: Any, **kwargs: Any) -> None:
        # "All on the CPU" is where Poros loads to. With llm_int8_enable_fp32_cpu_offload,
        # transformers would take it for what the user wants to be left dense.
        super()._process_model_before_weight_loading(model, **{**kwargs, "device_map": None})

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        needed = super().param_needs_quantization(model, param_name, **kwargs)
        return bool(needed) or self._is_placed(model, param_name)

    def get_weight_conversions(self) -> list[Any]:
        conversions: list[Any] = super().get_weight_conversions()
        for conversion in conversions:
            conversion.operations = [
                _Deserialize(inner, self._writer) for inner in conversion.operations
            ]
        return conversions


@contextmanager
def _carrying() -> Iterator[None]:
    """Carry an error of the body through transformers."""
    try:
        yield
    except Exception as error:
        raise LoadAborted(error) from error


class _Operation(ConversionOps):
    """An operation that uses a slab writer; a deep copy, as transformers makes, is the same one."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Operation":
        return self


class _Write(_Operation):
    """Quantizes or writes the given tensors."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: Any, **_: Any) -> dict[str, Any]:
        with _carrying():
            return {name: self._make(name, value, model) for name, value in input_dict.items()}

    def _make(self, name: str, value: Any, model: Any) -> torch.Tensor:
        tensor = _single(value)
        module_name, _, key = name.rpartition(".")
        module = model.get_submodule(module_name)
        planned = getattr(module, key)
        if not is_params4bit(planned):
            is_written = self._writer.gives_all or self._writer.has_place(name)
            return self._writer.write(name, tensor) if is_written else tensor
        if issubclass(module.source_cls, Conv1D):
            tensor = tensor.T
        format = Format.of(planned)
        packed, state = self._writer.quantize(name, tensor, format, planned.shape)
        made = replace(format, blocksize=state.blocksize, double_quant=state.nested)
        weight: torch.Tensor = made.weight(packed, state, module)
        own(module, weight)
        module._is_hf_initialized = True
        return weight


def _single(value: Any) -> torch.Tensor:
    """What transformers has read for a tensor, in a list or not."""
    return value[0] if isinstance(value, list) else value


class _Deserialize(_Operation):
    """Moves what bitsandbytes' own operation makes to its place."""

    def __init__(self, inner: Any, writer: SlabWriter) -> None:
        super().__init__(writer)
        self.inner = inner
        self.hf_quantizer = inner.hf_quantizer
        """transformers leaves the dtypes of tensors alone that go to an operation with one."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **kwargs: Any
    ) -> dict[str, Any]:
        with _carrying():
            planned = model.get_parameter_or_buffer(full_layer_name)
            if is_params4bit(planned) and len(input_dict) == 1:
                raise self._writer.dense(full_layer_name, *map(_single, input_dict.values()))
            if not is_params4bit(planned) and len(input_dict) > 1:
                wanted = "a dense weight, as config.json says (llm_int8_skip_modules?)"
                raise self._writer.defect(full_layer_name, wanted, "a 4-bit one")
            made = self._made(full_layer_name, input_dict, model=model, **kwargs)
            for weight in made.values():
                if not is_params4bit(weight):
                    continue
                quant_type = weight.quant_state.quant_type
                if quant_type != planned.quant_type:
                    wanted = f"quantization to {planned.quant_type}, as configured"
                    raise self._writer.defect(full_layer_name, wanted, quant_type)
                self._writer.require_packed(
                    full_layer_name, parts_of(weight), weight.quant_state, planned.shape
                )
                for part, place in places(full_layer_name, weight).items():
                    if part != "offset":
                        # Packed bytes may be stored as floats, and as floats they mean nothing.
                        is_packed = part == "packed"
                        place.put(self._writer.copy(place.name, place.get(), is_packed=is_packed))
        return made

    def _made(self, name: str, parts: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        try:
            return dict(self.inner.convert(parts, full_layer_name=name, **kwargs))
        except Exception as error:
            expected = "a quantization state that bitsandbytes reads"
            raise self._writer.defect(name, expected, describe_error(error)) from error
