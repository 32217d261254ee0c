"""The stages that turn bytes into values and values into bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.codecs.limits import Limits
from penstock.codecs.registry import Decoder, check_spec, decoder, encode, explicit
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.plan import Context, Fields, Map, Place, takes

FieldSpec = str | Callable[..., Any] | None


_LIMITS = Limits()


@dataclass(frozen=True)
class Decode(Map):
    """``decode(...)``: fields named by the user as given there, all others by ``spec`` and extension."""

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
            elif spec is not None and not callable(spec):
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

    @property
    def wants_rng(self) -> bool:
        return any(callable(spec) and takes(spec, "rng") for _, spec in self.by_field)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Decode every field that has a decoder, remembering which do."""
        decoders: dict[str, tuple[Callable[..., Any], bool] | None] = ctx.local.setdefault("decoders", {})

        def decode(sample: Any, rng: Any = None) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"decode needs a sample with fields, not {type(sample).__name__}")
            out = {}
            for name, value in sample.items():
                if isinstance(value, bytes) and not name.startswith("__"):
                    if name not in decoders:
                        decoders[name] = self._decoder(name)
                    if (known := decoders[name]) is not None:
                        value = _decoded(name, value, known, rng)
                out[name] = value
            return out

        return decode

    def _decoder(self, field: str) -> tuple[Callable[..., Any], bool] | None:
        """The field's decoder, and whether it takes the generator."""
        given = dict(self.by_field)
        call: Decoder | None
        if field not in given:
            call = decoder(field, self.spec, limits=self.limits, trust_pickle=self.trust_pickle)
        elif callable(spec := given[field]):
            return spec, takes(spec, "rng")
        else:
            call = explicit(field, spec, limits=self.limits, trust_pickle=self.trust_pickle)
        return None if call is None else (call, False)

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"decode: {exc}", place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error


def _decoded(name: str, value: bytes, known: tuple[Callable[..., Any], bool], rng: Any) -> Any:
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
    """Every field as bytes, by its extension: what a shard writer stores."""

    trust_pickle: bool = False

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Encode every field but those named ``__like_this__``."""

        def encoded(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise TypeError(f"a shard stores samples with fields, not {type(sample).__name__}")
            return {
                name: value if name.startswith("__") else encode(name, value, trust_pickle=self.trust_pickle)
                for name, value in sample.items()
            }

        return encoded

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"encode: {exc}", place.shard, place.key)
        error.__cause__ = exc
        return error
