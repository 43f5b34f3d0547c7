"""Settings: strict, frozen, and decodable from a dict, JSON or TOML."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from graphplat import buckets
from graphplat.batch import Phase
from graphplat.errors import ConfigError

BackendName = Literal["full", "breakable", "compiled", "disabled"]


class _Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checks types on direct construction too; msgspec alone does so only when decoding."""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for name in self.__struct_fields__:
            value = getattr(self, name)
            try:
                checked = msgspec.convert(value, hints[name], strict=True)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{type(self).__name__}: {error}", field=name) from error
            if checked is not value:
                msgspec.structs.force_setattr(self, name, checked)


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


PositiveInt = typing.Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = typing.Annotated[float, msgspec.Meta(gt=0)]


class PhaseConfig(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one phase is captured and run."""

    backend: BackendName = "full"
    """How a shape is recorded; ``disabled`` runs the phase eagerly."""
    buckets: tuple[int, ...] | None = None
    """Sizes to capture: requests for decode, tokens for prefill. ``None``: the default ladder."""
    max_size: PositiveInt | None = None
    """Largest size; the ladder is clipped to it and always contains it."""
    max_requests: PositiveInt = 64
    """Prefill only: request rows of a graph; unused rows are empty requests."""
    max_padding: typing.Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """Prefill only: a batch whose bucket over its tokens exceeds this runs eagerly."""
    variants: tuple[str, ...] = ()
    """Variants to capture beside the unnamed one; a batch with another runs eagerly."""
    capture: Literal["startup", "lazy"] = "startup"
    """``lazy`` captures a bucket when the first batch needs it."""
    max_graphs: PositiveInt | None = None
    """Upper limit of live graphs of this phase; startup thins the ladder, lazy evicts the least recent."""
    warmup: Literal["auto", "each"] = "auto"
    """``auto`` warms the largest bucket up, and any other only where capture shows the need."""
    compile: Literal["once", "each"] = "once"
    """Backend ``compiled``: kernels for all sizes together, or faster-fitting ones for each."""
    compile_options: dict[str, bool | int | float | str] = {}
    """Backend ``compiled``: options of torch's compiler, as ``torch.compile(options=...)`` takes them."""
    tolerance: PositiveFloat | None = None
    """Backend ``compiled``: largest difference from eager, as a part of the largest result. ``None``: 1e-8,
    1e-4, 2e-2 or 0.15 for float64, float32, float16 or bfloat16, by the least precise type in use."""
    outputs: Literal["copy", "view"] = "copy"
    """``copy``: results survive later steps. ``view``: zero copy, valid until the next step."""
    on_failure: Literal["raise", "eager"] = "raise"
    """What a failed capture does: raise, or run that bucket eagerly."""
    weights: Literal["recapture", "eager", "raise", "off"] = "recapture"
    """What happens when a weight's address moved since capture; ``off`` skips the check."""
    memory_budget_gb: PositiveFloat | None = None
    """GiB that this phase's graphs may add; what does not fit is dropped and reported."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.variants)) != len(self.variants):
            raise ConfigError(f"PhaseConfig: variants {self.variants!r} repeat one", field="variants")
        if self.buckets is not None:
            msgspec.structs.force_setattr(self, "buckets", buckets.check_buckets(self.buckets))

    def __hash__(self) -> int:
        options = tuple(sorted(self.compile_options.items()))
        rest = (getattr(self, name) for name in self.__struct_fields__ if name != "compile_options")
        return hash((options, *rest))

    def ladder(self, phase: Phase) -> tuple[int, ...]:
        """The effective bucket ladder, ascending; empty when disabled."""
        if self.backend == "disabled":
            return ()
        return buckets.resolve_ladder(phase, self.buckets, self.max_size)


class GraphConfig(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of both phases. ``GraphConfig()`` decodes through graphs and prefills eagerly."""

    decode: PhaseConfig = PhaseConfig()
    prefill: PhaseConfig = PhaseConfig(backend="disabled")
    on_unsupported: Literal["eager", "raise"] = "eager"
    """What asking for graphs on a platform without them does; the report holds the reason."""

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> GraphConfig:
        """Decode plain values; raises :class:`ConfigError` naming the path of a bad setting."""
        try:
            return msgspec.convert(dict(settings), cls, strict=True)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise ConfigError(f"bad setting: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> GraphConfig:
        """Decode JSON; raises :class:`ConfigError`."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"bad setting: {error}") from error

    @classmethod
    def from_toml(cls, text: str) -> GraphConfig:
        """Decode TOML; raises :class:`ConfigError`."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not TOML: {error}") from error

    def phase(self, phase: Phase) -> PhaseConfig:
        """The settings of *phase*."""
        return self.decode if phase is Phase.DECODE else self.prefill
