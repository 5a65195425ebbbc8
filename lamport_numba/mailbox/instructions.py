"""One wrapper for each PTX instruction of the mailbox: what the numba lowering is built from.

Each takes an LLVM builder and values, emits one instruction as inline PTX, and returns its result. Inline text is
inlined with the kernel; a linked PTX function would stay a call. The CTA barrier alone is numba's own intrinsic,
which stays convergent.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

WORD = ir.IntType(32)
PAIR = ir.IntType(64)
ADDRESS = ir.IntType(64)
_VOID = ir.VoidType()
_MEMORY = "~{memory}"  # no plain load or store may be moved across


def _emit(
    builder: Any, result: Any, text: str, constraints: str, arguments: list[tuple[Any, Any]], effect: bool = True
) -> Any:
    """Emit one instruction of inline PTX."""
    signature = ir.FunctionType(result, [kind for kind, _ in arguments])
    call = builder.asm(signature, text, constraints, [value for _, value in arguments], effect)
    if effect:
        call.attributes.add("convergent")  # so that no loop of polls is peeled: its loads stay one block
    return call


def to_global(builder: Any, address: Any) -> Any:
    """Take a generic address into the global space, as ld.global and st.global want it."""
    return _emit(builder, ADDRESS, "cvta.to.global.u64 $0, $1;", "=l,l", [(ADDRESS, address)], effect=False)


def load_pair(builder: Any, scope: str, address: Any) -> Any:
    """Read one pair: a single 8-byte access, which the memory model keeps whole."""
    return _emit(builder, PAIR, f"ld.relaxed.{scope}.global.b64 $0, [$1];", f"=l,l,{_MEMORY}", [(ADDRESS, address)])


def load_two_pairs(builder: Any, scope: str, address: Any) -> tuple[Any, Any]:
    """Read two pairs by one instruction; each is whole, the two together are not."""
    both = _emit(
        builder,
        ir.LiteralStructType([PAIR, PAIR]),
        f"ld.relaxed.{scope}.global.v2.b64 {{$0, $1}}, [$2];",
        f"=l,=l,l,{_MEMORY}",
        [(ADDRESS, address)],
    )
    return builder.extract_value(both, 0), builder.extract_value(both, 1)


def store_pair(builder: Any, scope: str, address: Any, pair: Any) -> None:
    """Write one pair."""
    _emit(
        builder,
        _VOID,
        f"st.relaxed.{scope}.global.b64 [$0], $1;",
        f"l,l,{_MEMORY}",
        [(ADDRESS, address), (PAIR, pair)],
    )


def store_two_pairs(builder: Any, scope: str, address: Any, first: Any, second: Any) -> None:
    """Write two pairs by one instruction."""
    _emit(
        builder,
        _VOID,
        f"st.relaxed.{scope}.global.v2.b64 [$0], {{$1, $2}};",
        f"l,l,l,{_MEMORY}",
        [(ADDRESS, address), (PAIR, first), (PAIR, second)],
    )


def fence(builder: Any, scope: str) -> None:
    """Order what this thread has seen and done before what it does next, at ``scope``."""
    _emit(builder, _VOID, f"fence.acq_rel.{scope};", _MEMORY, [])


def pack_bf16(builder: Any, low: Any, high: Any) -> Any:
    """Round two float32 to bf16 and pack them, ``low`` in the low half."""
    single = ir.FloatType()
    return _emit(
        builder, WORD, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [(single, low), (single, high)], effect=False
    )


def nanoseconds(builder: Any) -> Any:
    """Read the device's clock."""
    return _emit(builder, ir.IntType(64), "mov.u64 $0, %globaltimer;", f"=l,{_MEMORY}", [])


def load_word(builder: Any, address: Any) -> Any:
    """Read a 32-bit word that another thread of this GPU may write meanwhile."""
    return _emit(builder, WORD, "ld.relaxed.gpu.global.b32 $0, [$1];", f"=r,l,{_MEMORY}", [(ADDRESS, address)])


def load_long(builder: Any, address: Any) -> Any:
    """Read a 64-bit word that nobody writes during the launch."""
    return _emit(builder, ir.IntType(64), "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [(ADDRESS, address)])


def claim_word(builder: Any, address: Any) -> Any:
    """Turn a word from 0 to 1; returns what it was, so 0 for exactly one thread."""
    return _emit(
        builder, WORD, "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, 1;", f"=r,l,{_MEMORY}", [(ADDRESS, address)]
    )


def store_four_words(builder: Any, address: Any, words: list[Any]) -> None:
    """Write 16 bytes where the host can read them."""
    _emit(
        builder,
        _VOID,
        "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};",
        f"l,r,r,r,r,{_MEMORY}",
        [(ADDRESS, address), *((WORD, word) for word in words)],
    )


def store_word(builder: Any, address: Any, word: Any) -> None:
    """Write a word where the host can read it."""
    _emit(
        builder,
        _VOID,
        "st.relaxed.sys.global.b32 [$0], $1;",
        f"l,r,{_MEMORY}",
        [(ADDRESS, address), (WORD, word)],
    )
