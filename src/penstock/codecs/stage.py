"""The stages that decode the fields of samples and encode them for shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.codecs.feature_codecs import decode_file, feature_decoder, to_tar_field
from penstock.codecs.features import Feature
from penstock.codecs.limits import Limits
from penstock.codecs.registry import check_spec, decoder, decoder_by_spec, encode
from penstock.errors import MissingExtra, PlanError
from penstock.lazy import cached_property
from penstock.plan import (
    BatchRows,
    Block,
    Context,
    Fields,
    Map,
    Place,
    check_callable,
    check_flag,
    sample_error,
    takes_parameter,
)

FieldSpec = str | Feature | Callable[..., Any] | None

_LIMITS = Limits()
_FieldDecoder = tuple[Callable[..., Any], bool, bool]  # the function, and whether it takes ``rng`` and ``allocate``


@dataclass(frozen=True)
class Decode(Map):
    """``decode(...)``: decodes fields by the specs given for them, else by their features, else by extension.

    ``spec`` says how images are decoded that have no spec of their own.
    """

    uses_features = True
    optional_fields = True

    spec: str | None = None
    by_field: tuple[tuple[str, FieldSpec], ...] = ()
    trust_pickle: bool = False
    limits: Limits = _LIMITS

    def __post_init__(self) -> None:
        if self.spec is not None:
            if not isinstance(self.spec, str):
                raise PlanError(f"decode({self.spec!r}): give a spec such as 'rgb8', or name the field to decode")
            check_spec(self.spec)
        for name, spec in self.by_field:
            if isinstance(spec, str):
                try:
                    check_spec(spec, by_field=True)
                except PlanError as exc:
                    raise PlanError(f"decode({name}={spec!r}): {exc}") from None
            elif spec is not None and not isinstance(spec, Feature) and not callable(spec):
                raise PlanError(f"decode({name}={spec!r}): give a spec such as 'rgb8', a feature or a function")
            elif callable(spec):
                check_callable(f"decode({name}=...)", spec, constructs=False)
        check_flag("trust_pickle", self.trust_pickle)

    def describe(self) -> str:
        shown = [repr(self.spec)] * bool(self.spec)
        shown += [
            f"{name}={spec!r}" if isinstance(spec, str) else f"{name}={_spec_name(spec)}"
            for name, spec in self.by_field
        ]
        return f"decode({', '.join(shown)})"

    def needs(self, after: Fields) -> Fields:
        """Return the same fields: a field that no later stage needs is not decoded."""
        return after

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name, _ in self.by_field)

    def names_after(self, names: frozenset[str]) -> frozenset[str]:
        return names

    @cached_property  # asked for once per block, and blocks of large images are short
    def wants_rng(self) -> bool:
        return any(callable(spec) and takes_parameter(spec, "rng") for _, spec in self.by_field)

    def run(self, block: Block, ctx: Context) -> Block:
        ctx.rows = block.lineage.rows
        return super().run(block, ctx)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function that decodes a sample; it caches the decoder of each field in ``ctx``."""
        rows = ctx.rows
        decoders: dict[str, _FieldDecoder | None] = ctx.local.setdefault("decoders", {})
        with_feature = ctx.features.keys() | {name for name, spec in self.by_field if isinstance(spec, Feature)}
        with_function = {name for name, spec in self.by_field if callable(spec)}

        def decode(sample: Any, rng: Any = None) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"decode needs a sample with fields, not {type(sample).__name__}")
            out = {}
            for name, value in sample.items():
                if (
                    (isinstance(value, bytes) and not name.startswith("__"))
                    or name in with_feature
                    or name in with_function
                ):
                    if name not in decoders:
                        decoders[name] = self._field_decoder(name, ctx)
                    if (field_decoder := decoders[name]) is not None:
                        value = _decode_field(name, value, field_decoder, rng, rows)
                out[name] = value
            return out

        return decode

    def _field_decoder(self, field: str, ctx: Context) -> _FieldDecoder | None:
        """Return the decoder of a field; ``None`` if the field stays as it is."""
        specs, feature = dict(self.by_field), ctx.features.get(field)
        spec = specs.get(field)
        feature_to_decode = spec if isinstance(spec, Feature) else feature if field not in specs else None
        call: Callable[..., Any] | None = None
        if feature_to_decode is not None:
            call = feature_decoder(feature_to_decode, self.spec, limits=self.limits)
        if call is not None or isinstance(spec, Feature):
            return None if call is None else (call, False, False)
        if callable(spec):
            within = getattr(spec, "within", None)  # image transforms decode, so they have to know the limits
            call = spec if within is None else within(self.limits)
            if takes_parameter(call, "device"):
                call = partial(call, device=ctx.device)
        elif field in specs:
            call = decoder_by_spec(field, spec, limits=self.limits, trust_pickle=self.trust_pickle)
        else:
            call = decoder(field, self.spec, limits=self.limits, trust_pickle=self.trust_pickle)
        if call is None:
            return None
        takes_rng = callable(spec) and takes_parameter(spec, "rng")
        if feature is not None:
            return partial(decode_file, decode=call), takes_rng, False
        return call, takes_rng, getattr(call, "allocates", False)

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"decode: {exc}", place, exc.__cause__ or exc)


def _decode_field(name: str, value: Any, field_decoder: _FieldDecoder, rng: Any, rows: BatchRows | None) -> Any:
    call, takes_rng, allocates = field_decoder
    try:
        if allocates and rows is not None:
            return call(value, rng=rng, allocate=partial(rows.take, name))
        return call(value, rng=rng) if takes_rng else call(value)
    except MissingExtra:
        raise
    except Exception as exc:
        raise ValueError(f"field {name!r}: {exc}") from exc


def _spec_name(spec: Any) -> str:
    return "None" if spec is None else str(getattr(spec, "__name__", None) or repr(spec))


def field_specs(
    fields: Mapping[str, FieldSpec] | None, keywords: Mapping[str, FieldSpec]
) -> tuple[tuple[str, FieldSpec], ...]:
    """Merge the ``fields={...}`` argument of ``decode`` with its keyword arguments.

    Raises:
        PlanError: A field is in both.
    """
    fields = dict(fields or {})
    if duplicates := sorted(fields.keys() & keywords.keys()):
        raise PlanError(f"decode: {', '.join(duplicates)} is given twice, in fields= and as a keyword")
    return tuple({**fields, **keywords}.items())


@dataclass(frozen=True)
class Encode(Map):
    """Encodes every field to bytes, by its feature or extension, for a shard writer."""

    trust_pickle: bool = False

    uses_features = True

    def __post_init__(self) -> None:
        check_flag("trust_pickle", self.trust_pickle)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function that encodes a sample; fields named ``__like_this__`` stay as they are."""

        def encode_sample(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"a shard stores samples with fields, not {type(sample).__name__}")
            out = {}
            for name, value in sample.items():
                if name.startswith("__"):
                    out[name] = value
                    continue
                if name in ctx.features:
                    name, value = to_tar_field(name, ctx.features[name], value)
                if value is not None or name not in ctx.features:
                    out[name] = encode(name, value, trust_pickle=self.trust_pickle)
            return out

        return encode_sample

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"encode: {exc}", place, exc)
