"""How each call of the mailbox becomes instructions."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba.cuda import cgutils, nvvmutils, types
from numba.cuda.cudaimpl import registry

from . import instructions as ptx
from .device import POLL_MAX
from .numba_types import AddressType, MailboxType

PAIR_BYTES = 8
PATIENCE = 1024  # rounds of a poll between two looks at the clock

# The control block in device memory, and the report in host memory that it points to (see memory.py).
CONTROL_ALARM, CONTROL_TIMEOUT, CONTROL_REPORT, CONTROL_BYTES = 0, 8, 16, 32
REPORT_WRITTEN, REPORT_WHERE, REPORT_WHAT, REPORT_BYTES = 0, 16, 32, 48

_Lowered = TypeVar("_Lowered", bound=Callable[..., Any])
lower: Callable[..., Callable[[_Lowered], _Lowered]] = registry.lower
_ANY = types.VarArg(types.Any)
_WORD, _LONG = ir.IntType(32), ir.IntType(64)


def region_id(name: str) -> int:
    """The 32-bit number by which a report names a region."""
    return zlib.crc32(name.encode())


def _as_long(context: Any, builder: Any, value: Any, kind: Any) -> Any:
    return context.cast(builder, value, kind, types.int64)


def _bits(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, _WORD) if value.type == ir.FloatType() else value


def _pair(builder: Any, word: Any, tag: Any) -> Any:
    """Value in the low half, tag in the high half."""
    high = builder.shl(builder.zext(tag, _LONG), ir.Constant(_LONG, 32))
    return builder.or_(builder.zext(word, _LONG), high)


def _word_of(builder: Any, pair: Any) -> Any:
    return builder.trunc(pair, _WORD)


def _tag_of(builder: Any, pair: Any) -> Any:
    return builder.trunc(builder.lshr(pair, ir.Constant(_LONG, 32)), _WORD)


def _mailbox(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return cgutils.create_struct_proxy(kind)(context, builder, value=value)


def _pair_address(builder: Any, base: Any, index: Any) -> Any:
    return builder.add(base, builder.shl(index, ir.Constant(_LONG, 3)))


def _put(builder: Any, addr: AddressType, address: Any, tag: Any, words: list[Any]) -> None:
    """One store of one or two pairs."""
    pairs = [_pair(builder, word, tag) for word in words]
    if len(pairs) == 1:
        ptx.store_pair(builder, addr.scope, address, pairs[0])
    else:
        ptx.store_two_pairs(builder, addr.scope, address, *pairs)


@lower("sreg", _ANY)
@lower("preg", _ANY)
def _lower_region(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    base, offset = args[0], _as_long(context, builder, args[1], sig.args[1])
    base = context.cast(builder, base, sig.args[0], types.uint64)
    return ptx.to_global(builder, builder.add(base, offset))


@lower("Mailbox", _ANY)
def _lower_mailbox(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    mailbox = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    tag = mailbox.tag = context.cast(builder, args[0], sig.args[0], types.uint32)
    # An epoch that was never advanced has tag 0, as zeroed memory has: no pair that is there or put may match it.
    never = builder.icmp_unsigned("==", tag, ir.Constant(_WORD, 0))
    mailbox.wanted = builder.select(never, ir.Constant(_WORD, 1), tag)
    mailbox.control = ir.Constant(_LONG, 0)
    if sig.return_type.bounded:
        mailbox.control = ptx.to_global(builder, context.cast(builder, args[1], sig.args[1], types.uint64))
    return mailbox._getvalue()


@lower("Mailbox.put", _ANY)
def _lower_put(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    mailbox = _mailbox(context, builder, sig.args[0], args[0])
    address = _pair_address(builder, args[1], _as_long(context, builder, args[2], sig.args[2]))
    _put(builder, sig.args[1], address, mailbox.tag, [_bits(builder, args[3])])
    return context.get_dummy_value()


@lower("Mailbox.put_words", _ANY)
def _lower_put_words(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    mailbox = _mailbox(context, builder, sig.args[0], args[0])
    address = _pair_address(builder, args[1], _as_long(context, builder, args[2], sig.args[2]))
    _put(builder, sig.args[1], address, mailbox.tag, cgutils.unpack_tuple(builder, args[3]))
    return context.get_dummy_value()


@lower("Mailbox.put_bf", _ANY)
def _lower_put_bf(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    mailbox = _mailbox(context, builder, sig.args[0], args[0])
    element = _as_long(context, builder, args[2], sig.args[2])
    address = builder.add(args[1], builder.shl(element, ir.Constant(_LONG, 2)))  # half a pair an element
    values = cgutils.unpack_tuple(builder, args[3])
    words = [ptx.pack_bf16(builder, *values[k : k + 2]) for k in range(0, len(values), 2)]
    _put(builder, sig.args[1], address, mailbox.tag, words)
    return context.get_dummy_value()


@lower("publish", _ANY)
def _lower_publish(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    barrier = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), ()), "llvm.nvvm.barrier0")
    builder.call(barrier, ())
    tid, ntid = ([nvvmutils.call_sreg(builder, f"{register}.{axis}") for axis in "xyz"] for register in ("tid", "ntid"))
    plane = builder.add(builder.mul(tid[2], ntid[1]), tid[1])
    linear = builder.zext(builder.add(builder.mul(plane, ntid[0]), tid[0]), _LONG)
    who = _as_long(context, builder, args[4], sig.args[4])
    with builder.if_then(builder.icmp_unsigned("==", linear, who)):
        ptx.fence(builder, sig.args[1].scope)
        mailbox = _mailbox(context, builder, sig.args[0], args[0])
        address = _pair_address(builder, args[1], _as_long(context, builder, args[2], sig.args[2]))
        _put(builder, sig.args[1], address, mailbox.tag, [_bits(builder, args[3])])
    return context.get_dummy_value()


@lower("Mailbox.poll", _ANY)
def _lower_poll(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    wanted = []
    for spec_type, spec in zip(sig.args[1], cgutils.unpack_tuple(builder, args[1]), strict=True):
        addr, index, count = spec_type
        address, at, _ = cgutils.unpack_tuple(builder, spec)
        wanted.append((addr, address, _as_long(context, builder, at, index), count.literal_value))
    return _poll(context, builder, sig, args[0], wanted, sig.args[2:])


@lower("Mailbox.poll_each", _ANY)
def _lower_poll_each(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    index = _as_long(context, builder, args[2], sig.args[2])
    stride = _as_long(context, builder, args[3], sig.args[3])
    wanted = []
    for _ in range(sig.args[4].literal_value):
        wanted.append((sig.args[1], args[1], index, sig.args[5].literal_value))
        index = builder.add(index, stride)
    return _poll(context, builder, sig, args[0], wanted, sig.args[6:])


def _poll(context: Any, builder: Any, sig: Any, mailbox: Any, wanted: list[Any], acquire: Any) -> Any:
    """Poll batch after batch; returns the words in the shape that the call has."""
    mailbox = _mailbox(context, builder, sig.args[0], mailbox)
    found: list[list[Any]] = []
    batch: list[Any] = []
    for spec in wanted:
        if sum(pairs for *_, pairs in batch) + spec[3] > POLL_MAX:
            found += _poll_batch(builder, sig.args[0], mailbox, batch)
            batch = []
        batch.append(spec)
    if batch:
        found += _poll_batch(builder, sig.args[0], mailbox, batch)
        if acquire and acquire[0].literal_value:
            ptx.fence(builder, batch[0][0].scope)
    each = [context.make_tuple(builder, kind, words) for kind, words in zip(sig.return_type, found, strict=True)]
    return context.make_tuple(builder, sig.return_type, each)


def _poll_batch(builder: Any, kind: MailboxType, mailbox: Any, batch: list[Any]) -> list[list[Any]]:
    """Read all pairs of a batch together until every tag is this launch's: one block of loads, one branch."""
    addresses = [_pair_address(builder, address, index) for _, address, index, _ in batch]
    before = builder.block
    round_ = builder.append_basic_block("poll")
    stale = builder.append_basic_block("poll.stale")
    done = builder.append_basic_block("poll.done")
    builder.branch(round_)

    builder.position_at_end(round_)
    if kind.bounded:
        rounds, start = builder.phi(_WORD, "rounds"), builder.phi(_LONG, "start")
    loaded: list[tuple[Any, ...]] = []
    for (addr, *_, pairs), address in zip(batch, addresses, strict=True):
        load = ptx.load_two_pairs(builder, addr.scope, address) if pairs == 2 else None
        loaded.append(load or (ptx.load_pair(builder, addr.scope, address),))
    tags = [_tag_of(builder, pair) for each in loaded for pair in each]
    difference = ir.Constant(_WORD, 0)
    for tag in tags:
        difference = builder.or_(difference, builder.xor(tag, mailbox.wanted))
    fresh = builder.icmp_unsigned("==", difference, ir.Constant(_WORD, 0))
    builder.cbranch(fresh, done, stale)

    builder.position_at_end(stale)
    if kind.bounded:
        rounds.add_incoming(ir.Constant(_WORD, 0), before)
        start.add_incoming(ir.Constant(_LONG, 0), before)
        _watch(builder, mailbox, batch, tags, (rounds, start), (round_, done))
    else:
        builder.branch(round_)

    builder.position_at_end(done)
    return [[_word_of(builder, pair) for pair in each] for each in loaded]


def _watch(builder: Any, mailbox: Any, batch: Any, tags: Any, state: tuple[Any, Any], blocks: tuple[Any, Any]) -> None:
    """After a stale round: once in many, see whether the deadline has passed or another thread has given up; report
    the first.
    """
    (rounds, start), (round_, done) = state, blocks
    look = builder.append_basic_block("poll.look")
    give_up = builder.append_basic_block("poll.late")
    report = builder.append_basic_block("poll.report")

    counted = builder.add(rounds, ir.Constant(_WORD, 1))
    rounds.add_incoming(counted, builder.block)
    start.add_incoming(start, builder.block)
    patient = builder.and_(counted, ir.Constant(_WORD, PATIENCE - 1))
    builder.cbranch(builder.icmp_unsigned("==", patient, ir.Constant(_WORD, 0)), look, round_)

    builder.position_at_end(look)
    now = ptx.nanoseconds(builder)
    since = builder.select(builder.icmp_unsigned("==", start, ir.Constant(_LONG, 0)), now, start)
    waited = builder.sub(now, since)
    alarm = ptx.load_word(builder, mailbox.control)
    timeout = ptx.load_long(builder, builder.add(mailbox.control, ir.Constant(_LONG, CONTROL_TIMEOUT)))
    others = builder.icmp_unsigned("!=", alarm, ir.Constant(_WORD, 0))
    late = builder.icmp_unsigned(">=", waited, timeout)
    late = builder.or_(late, builder.icmp_unsigned("==", mailbox.tag, ir.Constant(_WORD, 0)))  # nothing can come
    rounds.add_incoming(counted, builder.block)
    start.add_incoming(since, builder.block)
    builder.cbranch(builder.or_(others, late), give_up, round_)

    builder.position_at_end(give_up)
    mine = builder.icmp_unsigned("==", ptx.claim_word(builder, mailbox.control), ir.Constant(_WORD, 0))
    builder.cbranch(mine, report, done)

    builder.position_at_end(report)
    region, index, seen = _first_stale(builder, mailbox, batch, tags)
    low, high = builder.trunc(index, _WORD), builder.trunc(builder.lshr(index, ir.Constant(_LONG, 32)), _WORD)
    at = ptx.load_long(builder, builder.add(mailbox.control, ir.Constant(_LONG, CONTROL_REPORT)))
    at = ptx.to_global(builder, at)
    milliseconds = builder.trunc(builder.udiv(waited, ir.Constant(_LONG, 1_000_000)), _WORD)
    zero = ir.Constant(_WORD, 0)
    ptx.store_four_words(builder, builder.add(at, ir.Constant(_LONG, REPORT_WHERE)), [region, low, high, zero])
    ptx.store_four_words(
        builder, builder.add(at, ir.Constant(_LONG, REPORT_WHAT)), [mailbox.tag, seen, milliseconds, zero]
    )
    ptx.fence(builder, "sys")
    ptx.store_word(builder, at, ir.Constant(_WORD, 1))
    builder.branch(done)


def _first_stale(builder: Any, mailbox: Any, batch: Any, tags: Any) -> tuple[Any, Any, Any]:
    """Region number, pair index and seen tag of the first stale pair of a batch."""
    pairs = [
        (region_id(addr.region), builder.add(index, ir.Constant(_LONG, k)))
        for addr, _, index, count in batch
        for k in range(count)
    ]
    region: Any = ir.Constant(_WORD, 0)
    where: Any = ir.Constant(_LONG, 0)
    seen: Any = mailbox.tag
    for (number, index), tag in reversed(list(zip(pairs, tags, strict=True))):
        stale = builder.icmp_unsigned("!=", tag, mailbox.wanted)
        region = builder.select(stale, ir.Constant(_WORD, number), region)
        where = builder.select(stale, index, where)
        seen = builder.select(stale, tag, seen)
    return region, where, seen


@lower("Mailbox.failed", _ANY)
def _lower_failed(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    if not sig.args[0].bounded:
        return cgutils.false_bit
    alarm = ptx.load_word(builder, _mailbox(context, builder, sig.args[0], args[0]).control)
    return builder.icmp_unsigned("!=", alarm, ir.Constant(_WORD, 0))


@lower("float_of", _ANY)
def _lower_float_of(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.bitcast(args[0], ir.FloatType())


@lower("int_of", _ANY)
def _lower_int_of(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return _bits(builder, args[0])


@lower("bf_of", _ANY)
def _lower_bf_of(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    word = _bits(builder, args[0])
    low = builder.shl(word, ir.Constant(_WORD, 16))
    high = builder.and_(word, ir.Constant(_WORD, 0xFFFF0000))
    return context.make_tuple(builder, sig.return_type, [builder.bitcast(each, ir.FloatType()) for each in (low, high)])
