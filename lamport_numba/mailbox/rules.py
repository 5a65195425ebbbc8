"""What a call of the mailbox may look like: its types in, its type out, and what to say when it is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba.cuda import types
from numba.cuda.core.errors import NumbaTypeError, NumbaValueError
from numba.cuda.cudadecl import registry
from numba.cuda.typing.templates import AttributeTemplate, signature

from . import device
from .numba_types import AddressType, MailboxType, Method, Operation

ALIGNMENT = 16  # of a region's base, so that two pairs can be one access

_HOW_TO_CAST = "cast it: np.int32(v) or np.uint32(v) for integers, np.float32(v) for floats"


def _rule(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a typing rule of a function from argument types to a return type; keywords are allowed."""

    def decorate(returns: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(returns)

        def rule(args: Any, kws: Any) -> Any:
            try:
                bound = parameters.bind(*args, **kws)
            except TypeError as error:
                wanted = ", ".join(parameters.parameters)
                raise NumbaTypeError(f"{name}({wanted}): {error}") from None
            given = inspect.Signature(
                [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in bound.arguments]
            )
            found = signature(returns(**bound.arguments), *bound.arguments.values())
            return found.replace(pysig=given) if kws else found

        return rule

    return decorate


def _address(name: str, value: Any) -> AddressType:
    if not isinstance(value, AddressType):
        raise NumbaTypeError(f"{name}: the address must come from sreg(...) or preg(...), got {value}")
    return value


def _integer(name: str, what: str, value: Any) -> None:
    if not isinstance(value, types.Integer):
        raise NumbaTypeError(f"{name}: {what} must be an integer, got {value}")


def _literal(name: str, what: str, value: Any) -> Any:
    if not isinstance(value, types.Literal):
        raise NumbaTypeError(f"{name}: {what} must be a constant when the kernel is compiled, got {value}")
    return value.literal_value


def _multiple(name: str, what: str, value: Any, unit: int, why: str) -> None:
    """Refuse a constant that is not a multiple; other values are checked where they are used."""
    if isinstance(value, types.IntegerLiteral) and value.literal_value % unit:
        raise NumbaValueError(f"{name}: {what} is {value.literal_value}, but {why} want a multiple of {unit}")


def _pairs(name: str, value: Any) -> int:
    pairs = _literal(name, "the number of pairs", value)
    if pairs not in (1, 2):
        raise NumbaValueError(f"{name}: {pairs} pairs, but one access holds 1 or 2")
    return int(pairs)


def _acquire(name: str, value: Any) -> None:
    if value is not False and not isinstance(_literal(name, "acquire", value), bool):
        raise NumbaTypeError(f"{name}: acquire must be True or False, got {value}")


def _value(name: str, value: Any) -> None:
    if value not in (types.int32, types.uint32, types.float32):
        raise NumbaTypeError(f"{name}: the value is {types.unliteral(value)}, but a pair holds 32 bits; {_HOW_TO_CAST}")


def _words(pairs: int) -> Any:
    return types.UniTuple(types.uint32, pairs)


def _region(space: str, name: str, base: Any, offset: Any, region: Any) -> AddressType:
    if not isinstance(base, types.Integer) or types.unliteral(base).bitwidth != 64:
        raise NumbaTypeError(f"{name}: base must be a 64-bit address, got {base}")
    _integer(name, "offset", offset)
    if not isinstance(region, types.StringLiteral):
        raise NumbaTypeError(f"{name}: region must be a string constant, got {region}")
    _multiple(name, f"the offset of region {region.literal_value!r}", offset, ALIGNMENT, "regions")
    return AddressType(space, region.literal_value)


@_rule("sreg")
def sreg_rule(base: Any, offset: Any, region: Any) -> Any:
    return _region("scratch", "sreg", base, offset, region)


@_rule("preg")
def preg_rule(base: Any, offset: Any, region: Any) -> Any:
    return _region("peer", "preg", base, offset, region)


@_rule("Mailbox")
def mailbox_rule(tag: Any, control: Any = None) -> Any:
    if isinstance(tag, types.IntegerLiteral):
        if not 0 < tag.literal_value < 2**32:
            raise NumbaValueError(f"Mailbox: the tag is {tag.literal_value}, but tags are 1 to 2**32 - 1")
    elif tag not in (types.int32, types.uint32):
        raise NumbaTypeError(
            f"Mailbox: the tag is {tag}, but it has 32 bits; take it from the epoch, or np.uint32(tag)"
        )
    if control is not None and (not isinstance(control, types.Integer) or types.unliteral(control).bitwidth != 64):
        raise NumbaTypeError(f"Mailbox: control must be a 64-bit address, got {control}")
    return MailboxType(bounded=control is not None)


@_rule("publish")
def publish_rule(mailbox: Any, addr: Any, i: Any, v: Any, who: Any) -> Any:
    if not isinstance(mailbox, MailboxType):
        raise NumbaTypeError(f"publish: the first argument must be a Mailbox, got {mailbox}")
    _address("publish", addr)
    _integer("publish", "i", i)
    _value("publish", v)
    _integer("publish", "who", who)
    return types.none


@_rule("float_of")
def float_of_rule(word: Any) -> Any:
    _value("float_of", word)
    return types.float32


@_rule("int_of")
def int_of_rule(word: Any) -> Any:
    _value("int_of", word)
    return types.int32


@_rule("bf_of")
def bf_of_rule(word: Any) -> Any:
    _value("bf_of", word)
    return types.UniTuple(types.float32, 2)


@_rule("Mailbox.put")
def put_rule(addr: Any, i: Any, v: Any) -> Any:
    _address("Mailbox.put", addr)
    _integer("Mailbox.put", "i", i)
    _value("Mailbox.put", v)
    return types.none


@_rule("Mailbox.put_words")
def put_words_rule(addr: Any, i: Any, words: Any) -> Any:
    name = "Mailbox.put_words"
    _address(name, addr)
    _integer(name, "i", i)
    if not isinstance(words, types.BaseTuple) or len(words) not in (1, 2):
        raise NumbaTypeError(f"{name}: words must be a tuple of 1 or 2 words, got {words}")
    for word in words:
        if word not in (types.int32, types.uint32):
            raise NumbaTypeError(
                f"{name}: a word is {types.unliteral(word)}, but words are int32 or uint32 "
                "(a float register may change a NaN); cast it: np.int32(w) or np.uint32(w)"
            )
    _multiple(name, "i", i, len(words), "two pairs in one access")
    return types.none


@_rule("Mailbox.put_bf")
def put_bf_rule(addr: Any, i: Any, values: Any) -> Any:
    name = "Mailbox.put_bf"
    _address(name, addr)
    _integer(name, "i", i)
    if not isinstance(values, types.BaseTuple) or len(values) not in (2, 4):
        raise NumbaTypeError(f"{name}: values must be a tuple of 2 or 4 float32, got {values}")
    for value in values:
        if value != types.float32:
            raise NumbaTypeError(
                f"{name}: a value is {types.unliteral(value)}, but float32 is rounded to bf16; cast it: np.float32(x)"
            )
    _multiple(name, "element i", i, len(values), f"{len(values)} elements in one access")
    return types.none


@_rule("Mailbox.poll")
def poll_rule(specs: Any, acquire: Any = False) -> Any:
    name = "Mailbox.poll"
    _acquire(name, acquire)
    if not isinstance(specs, types.BaseTuple):
        raise NumbaTypeError(f"{name}: specs must be a tuple of (address, pair index, pairs), got {specs}")
    first: AddressType | None = None
    found = []
    for spec in specs:
        if not isinstance(spec, types.BaseTuple) or len(spec) != 3:
            raise NumbaTypeError(f"{name}: a spec is (address, pair index, pairs), got {spec}")
        addr, i, count = spec
        addr = _address(name, addr)
        first = first or addr
        if addr.space != first.space:
            raise NumbaTypeError(
                f"{name}: {first} and {addr} are of two spaces, which want two scopes "
                f"({first.scope} and {addr.scope}); poll them separately"
            )
        _integer(name, "a pair index", i)
        pairs = _pairs(name, count)
        _multiple(name, f"a pair index of {addr}", i, pairs, "two pairs in one access")
        found.append(_words(pairs))
    return types.BaseTuple.from_types(found)


@_rule("Mailbox.poll_each")
def poll_each_rule(addr: Any, i: Any, stride: Any, sources: Any, pairs: Any, acquire: Any = False) -> Any:
    name = "Mailbox.poll_each"
    _acquire(name, acquire)
    _address(name, addr)
    _integer(name, "i", i)
    _integer(name, "stride", stride)
    count = _literal(name, "the number of sources", sources)
    if not isinstance(count, int) or count < 0:
        raise NumbaValueError(f"{name}: {count} sources, but it must be an integer of at least 0")
    each = _pairs(name, pairs)
    _multiple(name, "i", i, each, "two pairs in one access")
    _multiple(name, "stride", stride, each, "two pairs in one access")
    return types.BaseTuple.from_types([_words(each)] * count)


@_rule("Mailbox.failed")
def failed_rule() -> Any:
    return types.boolean


_METHODS = {
    "put": put_rule,
    "put_words": put_words_rule,
    "put_bf": put_bf_rule,
    "poll": poll_rule,
    "poll_each": poll_each_rule,
    "failed": failed_rule,
}


@registry.register_attr
class _MailboxMethods(AttributeTemplate):  # type: ignore[misc]
    key = MailboxType

    def generic_resolve(self, mailbox: Any, name: str) -> Any:
        rule = _METHODS.get(name)
        return Method(f"Mailbox.{name}", rule, mailbox) if rule else None


for _function, _name, _its_rule in (
    (device.sreg, "sreg", sreg_rule),
    (device.preg, "preg", preg_rule),
    (device.Mailbox, "Mailbox", mailbox_rule),
    (device.publish, "publish", publish_rule),
    (device.float_of, "float_of", float_of_rule),
    (device.int_of, "int_of", int_of_rule),
    (device.bf_of, "bf_of", bf_of_rule),
):
    registry.register_global(_function, Operation(_name, _its_rule))
