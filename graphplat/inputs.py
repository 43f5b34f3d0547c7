"""Input specs: what a runtime's batches hold, declared once.

From a spec the library allocates static buffers, checks every incoming field
before it touches one, copies real rows in and resets padded rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, cast

import attrs
import msgspec
import torch

from graphplat import tree
from graphplat.errors import InputError

RowDim = Literal["requests", "tokens", "requests+1"]
_ROW_DIMS = ("requests", "tokens", "requests+1")
_DIM_HINT = f"Use a number, UpTo or one of {_ROW_DIMS}"


class UpTo(msgspec.Struct, frozen=True):
    """A dimension that varies from batch to batch, up to *size*.

    A graph holds *size*; a narrower batch is widened with the fill value, a wider
    one runs eagerly. Raises :class:`InputError` unless *size* is a positive ``int``.
    """

    size: int

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise InputError(f"UpTo takes a positive integer, found {self.size!r}")


def _as_dims(dims: Iterable[str | int | UpTo]) -> tuple[RowDim | int | UpTo, ...]:
    if isinstance(dims, (str, int, UpTo)):
        raise InputError(f"dims takes several dimensions, found {dims!r}", hint=f"Write ({dims!r},)")
    return cast("tuple[RowDim | int | UpTo, ...]", tuple(dims))  # names are checked next


def _check_dims(_: Any, __: Any, dims: tuple[Any, ...]) -> None:
    for axis, dim in enumerate(dims):
        if isinstance(dim, str):
            if dim not in _ROW_DIMS:
                raise InputError(f"unknown dimension {dim!r}", hint=_DIM_HINT)
            if axis:
                raise InputError(f"dimension {dim!r} must come first, found at axis {axis}")
        elif not isinstance(dim, UpTo) and (type(dim) is not int or dim < 0):
            raise InputError(f"dimension {dim!r} is not a size", hint=_DIM_HINT)


def _check_dtype(_: Any, __: Any, dtype: object) -> None:
    if isinstance(dtype, torch.dtype):
        return
    name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.")
    meant = getattr(torch, {"int": "int64"}.get(name, name), None)  # torch.int has half of Python's bits
    hint = f"Write {meant}" if isinstance(meant, torch.dtype) else "Write torch.int64, for instance"
    raise InputError(f"dtype must be a torch.dtype, found {dtype!r}", hint=hint)


@attrs.frozen
class TensorSpec:
    """One tensor input.

    ``dims``: ``"requests"``, ``"tokens"`` or ``"requests+1"`` first (or none of them: a
    constant shape), then numbers (exact) or :class:`UpTo`. ``fill`` is what
    padded rows hold; ``"last"`` repeats the last real row, as cumulative
    lengths need. ``optional`` inputs may be absent; each set of present ones
    has graphs of its own.
    """

    dims: tuple[RowDim | int | UpTo, ...] = attrs.field(
        default=("tokens",), converter=_as_dims, validator=_check_dims
    )
    dtype: torch.dtype = attrs.field(default=torch.int64, kw_only=True, validator=_check_dtype)
    fill: float | int | bool | Literal["last"] = attrs.field(default=0, kw_only=True)
    optional: bool = attrs.field(default=False, kw_only=True)
    is_tree_leaf: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        if self.fill == "last":
            if self.row_dim is None:
                raise InputError("fill 'last' needs a row dimension", hint="Give a number as fill")
            return
        try:
            held = torch.full((), self.fill, dtype=self.dtype, device="cpu").item()
        except (RuntimeError, TypeError) as error:
            raise InputError(f"fill {self.fill!r} is no {self.dtype}: {error}") from error
        if held != self.fill and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise InputError(f"fill {self.fill!r} is no {self.dtype}: padded rows would hold {held!r}")

    @property
    def row_dim(self) -> RowDim | None:
        """The dimension that counts rows, if any."""
        first = self.dims[0] if self.dims else None
        return first if isinstance(first, str) else None

    def rows(self, requests: int, tokens: int) -> int | None:
        """Rows of a batch of *requests* and *tokens*; ``None`` for a constant shape."""
        dim = self.row_dim
        if dim is None:
            return None
        return {"requests": requests, "tokens": tokens, "requests+1": requests + 1}[dim]

    def shape(self, requests: int, tokens: int) -> tuple[int, ...]:
        """The shape of the buffer that holds *requests* and *tokens*."""
        rows = self.rows(requests, tokens)
        rest = [dim.size if isinstance(dim, UpTo) else dim for dim in self.dims]
        if rows is not None:
            rest[0] = rows
        return tuple(size for size in rest if isinstance(size, int))

    @property
    def varies(self) -> bool:
        """Whether a dimension beside the rows varies."""
        return any(isinstance(dim, UpTo) for dim in self.dims)


def _as_values(values: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"values takes several values, found {values!r}", hint=f"Write ({values!r},)")
    return tuple(values)


@attrs.frozen
class HostSpec:
    """One host value (a Python number, string or list) that a graph bakes in.

    Exactly one rule says how a replay may differ from its capture:

    - ``values=(…)``: one graph for each declared value; another value runs eagerly.
    - ``maximum=N``: captured with the worst case *N*; a larger value runs eagerly. The
      forward must give the same result for any launch bound at least as large.
    - ``update=True``: a list of one number a request (``per="requests"``) that the
      platform rewrites in the graph at each replay under the field's own name, where it
      declares the ability; elsewhere the batch runs eagerly.

    ``fill`` pads an updated list; ``fill`` is also its value at capture.
    """

    values: tuple[Any, ...] = attrs.field(default=(), converter=_as_values, kw_only=True)
    maximum: int | float | None = attrs.field(default=None, kw_only=True)
    update: bool = attrs.field(default=False, kw_only=True)
    per: Literal["requests", "requests+1", "tokens"] = attrs.field(default="requests", kw_only=True)
    fill: int = attrs.field(default=0, kw_only=True)
    is_tree_leaf: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        if self.per not in _ROW_DIMS:
            raise InputError(f"per={self.per!r} counts nothing", hint=f"Use one of {_ROW_DIMS}")
        if self.maximum is not None and type(self.maximum) not in (int, float):
            raise InputError(f"maximum must be a number, found {self.maximum!r}")
        if type(self.fill) is not int:
            raise InputError(f"fill must be a whole number, found {self.fill!r}")
        rules = bool(self.values) + (self.maximum is not None) + self.update
        if rules != 1:
            raise InputError(
                f"a host value follows exactly one rule, found {rules}",
                hint="Give one of values=, maximum= or update=True",
            )
        try:
            distinct = len(set(self.values)) == len(self.values)
        except TypeError as error:
            raise InputError(f"host values {self.values!r} must be hashable: {error}") from error
        if not distinct:
            raise InputError(f"host values {self.values!r} hold equal ones, which graphs cannot tell apart")

    @property
    def capture_values(self) -> tuple[Any, ...]:
        """The values a graph is captured with; an updated list depends on the size."""
        return self.values if self.values else (self.maximum,)

    def rows(self, requests: int, tokens: int) -> int:
        """The length of an updated list."""
        return {"requests": requests, "tokens": tokens, "requests+1": requests + 1}[self.per]


class InputSpec:
    """Declares every input of a phase.

    Keyword arguments are the fields of ``ForwardBatch.inputs``: a
    :class:`TensorSpec`, a :class:`HostSpec`, or a dict, list, tuple, dataclass,
    attrs object or Struct of them. Raises :class:`InputError` for anything else, and for two
    inputs of one path, such as ``{"a.b": …}`` beside ``{"a": {"b": …}}``.
    """

    def __init__(self, /, **fields: Any) -> None:
        self.fields = fields
        leaves = tree.leaves(fields, "inputs", InputError)
        for path, leaf in leaves.items():
            if not isinstance(leaf, (TensorSpec, HostSpec)):
                raise InputError(
                    f"an input is declared by a TensorSpec or HostSpec, found {type(leaf).__name__}",
                    field=path,
                )
            if isinstance(leaf, TensorSpec) and leaf.optional and path not in fields:
                raise InputError(
                    "only top-level inputs can be optional",
                    field=path,
                    hint="Make the whole structure a field",
                )
        self.tensors: dict[str, TensorSpec] = {p: s for p, s in leaves.items() if isinstance(s, TensorSpec)}
        self.hosts: dict[str, HostSpec] = {p: s for p, s in leaves.items() if isinstance(s, HostSpec)}
        self.optional: tuple[str, ...] = tuple(p for p, s in self.tensors.items() if s.optional)
        self.is_flat: bool = all(path in fields for path in leaves)

    def __repr__(self) -> str:
        return f"InputSpec({', '.join(f'{name}={spec!r}' for name, spec in self.fields.items())})"

    def presence_sets(self) -> list[frozenset[str]]:
        """The sets of optional inputs that get graphs: every one up to three, else none and all."""
        if len(self.optional) > 3:
            return [frozenset(self.optional), frozenset()]
        sets = [frozenset[str]()]
        for name in self.optional:
            sets += [present | {name} for present in sets]
        return sets[::-1]

    def read(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The leaves of *inputs* by path; raises :class:`InputError` on another structure."""
        found: dict[str, Any] = {}
        self._read(self.fields, inputs, "", found)
        return found

    def _read(self, spec: Any, value: Any, path: str, found: dict[str, Any]) -> None:
        if isinstance(spec, (TensorSpec, HostSpec)):
            found[path] = value
            return
        inner = tree.children(spec) or []
        actual = tree.children(value)
        if actual is None or (path and type(value) is not type(spec)):
            raise InputError(
                f"expected {type(spec).__name__}, found {type(value).__name__}", field=path or "inputs"
            )
        given = dict(actual)
        absent: dict[tree.Step, bool] = {}
        for step, inner_spec in inner:
            if step not in given or (given[step] is None and isinstance(inner_spec, TensorSpec)):
                given.pop(step, None)
                absent[step] = isinstance(inner_spec, TensorSpec) and inner_spec.optional
            else:
                self._read(inner_spec, given.pop(step), tree.join(path, step), found)
        if given or not all(absent.values()):
            raise _mismatch(path, absent, given)

    def build(self, leaves: dict[str, Any]) -> dict[str, Any]:
        """A structure like the spec from *leaves* by path; absent optional ones are left out."""
        present = {
            name: spec for name, spec in self.fields.items() if name in leaves or name not in self.optional
        }
        built: dict[str, Any] = tree.map_leaves(lambda path, _: leaves[path], present)
        return built


def _mismatch(path: str, absent: Mapping[tree.Step, bool], unknown: Iterable[tree.Step]) -> InputError:
    """The error for *unknown* inputs at *path*, and declared ones that are *absent* though not optional."""
    missing = [tree.join(path, step) for step, optional in absent.items() if not optional]
    extra = [tree.join(path, step) for step in unknown]
    lists = (("missing", missing), ("not declared in the input spec", extra))
    told = [(what, names) for what, names in lists if names]
    if len(missing) + len(extra) == 1:
        what = told[0][0]  # the field says which
    else:
        what = "; ".join(f"{what}: {', '.join(map(repr, names))}" for what, names in told)
    close = {
        str(given): difflib.get_close_matches(str(given), [str(name) for _, name in absent], n=1)
        for _, given in unknown
    }
    meant = [f"{names[0]!r} by {given!r}" for given, names in close.items() if names]
    if meant:
        hint = f"Did you mean {', '.join(meant)}?"
    elif missing:
        hint = "Every declared input that is not optional must be given"
    else:
        hint = "Declare it, or leave it out"
    return InputError(what, field=(missing + extra)[0], hint=hint)
