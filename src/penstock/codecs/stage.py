"""The stages that turn bytes into values and values into bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from penstock.codecs.feature_codecs import as_member, decoder_of, of_file
from penstock.codecs.features import Feature
from penstock.codecs.limits import Limits
from penstock.codecs.registry import check_spec, decoder, encode, explicit
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.plan import Context, Fields, Map, Place, takes_parameter

FieldSpec = str | Feature | Callable[..., Any] | None


_LIMITS = Limits()


@dataclass(frozen=True)
class Decode(Map):
    """``decode(...)``: fields named by the user as given there, others by their features, or ``spec`` and extension."""

    follows_features = True

    spec: str | None = None
    by_field: tuple[tuple[str, FieldSpec], ...] = ()
    trust_pickle: bool = False
    limits: Limits = _LIMITS

    def __post_init__(self) -> None:
        if self.spec is not None:
            if not isinstance(self.spec, str):
                raise PlanError(f"decode({self.spec!r}): give a spec such as 'rgb8', or name the field it is for")
            check_spec(self.spec)
        for _, spec in self.by_field:
            if isinstance(spec, str):
                check_spec(spec, by_field=True)
            elif spec is not None and not isinstance(spec, Feature) and not callable(spec):
                raise PlanError(f"decode: {spec!r} is neither a spec nor a function")

    def describe(self) -> str:
        shown = [repr(self.spec)] * bool(self.spec)
        shown += [
            f"{name}={spec!r}" if isinstance(spec, str) else f"{name}={_word(spec)}" for name, spec in self.by_field
        ]
        return f"decode({', '.join(shown)})"

    def needs(self, after: Fields) -> Fields:
        """The same fields: what nobody asks for is not decoded."""
        return after

    @cached_property  # asked for once a block, and blocks of large images are short
    def wants_rng(self) -> bool:
        return any(callable(spec) and takes_parameter(spec, "rng") for _, spec in self.by_field)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Decode every field that has a decoder, remembering which do."""
        decoders: dict[str, tuple[Callable[..., Any], bool] | None] = ctx.local.setdefault("decoders", {})
        typed = ctx.features.keys() | {name for name, spec in self.by_field if isinstance(spec, Feature)}
        asked = {name for name, spec in self.by_field if callable(spec)}

        def decode(sample: Any, rng: Any = None) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"decode needs a sample with fields, not {type(sample).__name__}")
            out = {}
            for name, value in sample.items():
                if (isinstance(value, bytes) and not name.startswith("__")) or name in typed or name in asked:
                    if name not in decoders:
                        decoders[name] = self._decoder(name, ctx.features.get(name))
                    if (known := decoders[name]) is not None:
                        value = _decoded(name, value, known, rng)
                out[name] = value
            return out

        return decode

    def _decoder(self, field: str, feature: Feature | None) -> tuple[Callable[..., Any], bool] | None:
        """The field's decoder, and whether it takes the generator."""
        given = dict(self.by_field)
        spec = given.get(field)
        asked = spec if isinstance(spec, Feature) else feature if field not in given else None
        call: Callable[..., Any] | None = None
        if asked is not None:
            call = decoder_of(asked, self.spec, limits=self.limits)
        if call is not None or isinstance(spec, Feature):
            return None if call is None else (call, False)
        if callable(spec):
            within = getattr(spec, "within", None)  # a transform of images: it decodes, and has to know the limits
            call = spec if within is None else within(self.limits)
        elif field in given:
            call = explicit(field, spec, limits=self.limits, trust_pickle=self.trust_pickle)
        else:
            call = decoder(field, self.spec, limits=self.limits, trust_pickle=self.trust_pickle)
        if call is None:
            return None
        random = callable(spec) and takes_parameter(spec, "rng")
        return partial(of_file, decode=call) if feature is not None else call, random

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"decode: {exc}", place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error


def _decoded(name: str, value: Any, known: tuple[Callable[..., Any], bool], rng: Any) -> Any:
    call, random = known
    try:
        return call(value, rng=rng) if random else call(value)
    except MissingExtra:
        raise
    except Exception as exc:
        raise ValueError(f"field {name!r}: {exc}") from exc


def _word(spec: Any) -> str:
    return "None" if spec is None else str(getattr(spec, "__name__", None) or repr(spec))


def field_specs(
    fields: Mapping[str, FieldSpec] | None, named: Mapping[str, FieldSpec]
) -> tuple[tuple[str, FieldSpec], ...]:
    """Put ``fields={...}`` and keyword arguments together.

    Raises:
        PlanError: a field is given twice.
    """
    fields = dict(fields or {})
    if twice := sorted(fields.keys() & named.keys()):
        raise PlanError(f"decode: {', '.join(twice)} is given twice")
    return tuple({**fields, **named}.items())


@dataclass(frozen=True)
class Encode(Map):
    """Every field as bytes, by its extension or its feature: what a shard writer stores."""

    trust_pickle: bool = False

    follows_features = True

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Encode every field but those named ``__like_this__``."""

        def encoded(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"a shard stores samples with fields, not {type(sample).__name__}")
            out = {}
            for name, value in sample.items():
                if name in ctx.features:
                    name, value = as_member(name, ctx.features[name], value)
                if name.startswith("__"):
                    out[name] = value
                elif value is not None or name not in ctx.features:
                    out[name] = encode(name, value, trust_pickle=self.trust_pickle)
            return out

        return encoded

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"encode: {exc}", place.shard, place.key)
        error.__cause__ = exc
        return error
