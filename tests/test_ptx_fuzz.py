"""Mutated PTX ends in a PtxError or is translated; it never crashes the parser or the translator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.ptx import HEADER
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamport_numba.emulator.ptx.parser import parse
from lamport_numba.emulator.ptx.translate import translate
from lamport_numba.errors import PtxError

DATA = Path(__file__).parent / "data"
KERNEL = f"""{HEADER}
.global .align 8 .b8 table[16] = {{1, 2, 3}};
.global .u64 pointer = generic(table)+8;
.extern .shared .align 16 .b8 dynamic[];
.func (.param .b32 r) twice(.param .b32 a) {{ .reg .b32 %r<3>; ld.param.b32 %r1, [a]; shl.b32 %r2, %r1, 1;
 st.param.b32 [r], %r2; ret; }}
.visible .entry k(.param .u64 out, .param .align 4 .b8 s[12]) .maxntid 128, 1, 1
{{
 .reg .b64 %rd<8>; .reg .b32 %r<20>; .reg .f32 %f<5>; .reg .pred %p<4>; .local .align 8 .b8 depot[32];
 ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [s+4];
 mov.u32 %r2, %tid.x; setp.lt.u32 %p1, %r2, 16; @!%p1 bra DONE;
 LOOP: ld.volatile.global.v2.u32 {{%r3, %r4}}, [%rd2+8]; add.s32 %r5, %r3, -7; setp.eq.or.s32 %p2|%p3, %r5, %r4, %p1;
 @%p2 bra LOOP; mov.b64 %rd3, {{%r3, %r4}}; mad.lo.s32 %r6, %r5, %r2, 0x1F; fma.rn.f32 %f1, %f2, 0f3F800000, %f3;
 shfl.sync.down.b32 %r7|%p2, %r6, 1, 31, -1; bar.sync 0; atom.global.cas.b32 %r8, [%rd2], %r1, %r7;
 {{ .reg .b32 x; .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r7; call.uni (r0), twice, (p0);
   ld.param.b32 x, [r0]; add.u32 %r9, x, 1; }}
 mov.u64 %rd4, depot; cvta.local.u64 %rd5, %rd4; st.u32 [%rd5+4], %r9; st.shared.u32 [dynamic+4], %r9;
 multimem.st.relaxed.sys.global.v4.f32 [%rd2], {{%f1, %f1, %f1, %f1}}; st.release.sys.global.u32 [%rd2], %r9;
 DONE: ret;
}}
"""
TEXTS = [KERNEL, (DATA / "integers.ptx").read_text()[:6000], (DATA / "programs.ptx").read_text()[-9000:]]
ODD = ["-", "0x", "1e5", "4294967296", "9" * 50, '"', "/*", "\0", "é"]
PIECES = [*sorted(set(re.findall(r"[.%@\w$]+|[^\s\w]", KERNEL))), *ODD]


def survives(text: str) -> None:
    try:
        source = parse(text)
        for function in source.functions.values():
            if function.is_kernel and function.body is not None:
                translate(source, function)
    except PtxError as error:
        assert error.line is None or 1 <= error.line <= text.count("\n") + 1  # noqa: PT017


MODEST = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@MODEST
@given(st.data())
def test_replaced_and_removed_pieces(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = list(re.finditer(r"[.%@\w$]+|[^\s\w]", text))
        if not tokens:
            break
        match = tokens[data.draw(st.integers(0, len(tokens) - 1))]
        how = data.draw(st.sampled_from(["replace", "remove", "repeat", "insert"]))
        piece = data.draw(st.sampled_from(PIECES))
        new = {"replace": piece, "remove": "", "repeat": match.group() * 2, "insert": f"{match.group()} {piece} "}[how]
        text = text[: match.start()] + new + text[match.end() :]
    survives(text)


@MODEST
@given(st.sampled_from(TEXTS), st.integers(0, 10_000), st.integers(0, 200))
def test_truncated_and_cut_out(text: str, at: int, length: int) -> None:
    at %= len(text)
    survives(text[:at])
    survives(text[:at] + text[at + length :])


NOISE = [*'{}[]()<>;:,.+-@!%|=\n "', "0", "9", "a", ".entry", ".reg", ".b32", "%r1"]


@MODEST
@given(st.lists(st.sampled_from(NOISE), max_size=80).map("".join))
def test_noise(noise: str) -> None:
    survives(HEADER + noise)
    survives(HEADER + ".entry k() {" + noise)
    survives(HEADER + ".entry k() { .reg .b32 %r<4>; " + noise + " ret; }")


@pytest.mark.parametrize("opening", ["{", "(", "[", ".global .b8 x = {", "{ .reg .b32 x; "])
def test_deep_nesting(opening: str) -> None:
    survives(HEADER + opening * 5000)
    survives(HEADER + ".entry k() {" + opening * 5000)


def test_numbers_too_large() -> None:
    survives(HEADER + ".global .b8 x[99999999999999999999];")
    survives(HEADER + f".global .align {'9' * 300} .b8 x[4];")
    survives(HEADER + f".entry k() {{ .reg .b32 %r<4>; mov.u32 %r1, {'9' * 6000}; ret; }}")
    survives(HEADER + f".entry k() {{ .reg .b32 %r<4>; mov.u32 %r1, 0x{'f' * 6000}; ret; }}")
    survives(HEADER + ".entry k(.param .b8 x[4294967296]) { ret; }")
