"""The mailbox's device API as numba compiles it: the shape of the PTX, and what is refused. No device is needed."""

import re

import numpy as np
import pytest
from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import types
from numba.cuda.core.errors import TypingError

from lamport_numba import mailbox as module
from lamport_numba.mailbox import POLL_MAX, Mailbox, bf_of, float_of, int_of, preg, publish, sreg

ADDRESS, TAG, WORDS, FLOATS = types.uint64, types.uint32, types.uint32[::1], types.float32[::1]
LOAD = re.compile(r"ld\.relaxed\.(gpu|sys)\.global\.(v2\.)?b64")


def compiled(function, *arguments):
    """The body of a kernel's PTX."""
    texts, _ = cuda.compile_ptx(function, types.void(*arguments), cc=(9, 0))
    return (texts if isinstance(texts, str) else texts[0]).split("\n{\n", 1)[1]


def blocks(body):
    """The basic blocks of a kernel, in order, as lists of instructions."""
    found = [[]]
    for line in body.splitlines():
        line = line.strip()
        if re.match(r"\$L\w+:", line):
            found.append([])
        elif line and not line.startswith(("//", ".", "}")):
            found[-1].append(line)
            if re.match(r"(@!?%p\d+ )?(bra|ret)", line):
                found.append([])
    return [block for block in found if block]


def registers(function, *arguments):
    """How many registers a kernel uses, and how many bytes of stack, as the assembler says."""
    texts, _ = cuda.compile_ptx(function, types.void(*arguments), cc=(9, 0))
    text = (texts if isinstance(texts, str) else texts[0]).encode()
    handle = nvjitlink.create(2, ["-arch=sm_90", "-verbose"])
    nvjitlink.add_data(handle, nvjitlink.InputType.PTX, text, len(text), "kernel")
    nvjitlink.complete(handle)
    log = bytearray(nvjitlink.get_info_log_size(handle))
    nvjitlink.get_info_log(handle, log)
    nvjitlink.destroy(handle)
    said = log.decode()
    return int(re.search(r"[Uu]sed (\d+) registers", said)[1]), int(re.search(r"(\d+) bytes stack frame", said)[1])


def poll_1(base, tag, out):
    mailbox = Mailbox(tag)
    ((a,),) = mailbox.poll(((sreg(base, 0, "a"), out[0], 1),))
    out[0] = a


def poll_2(base, tag, out):
    mailbox = Mailbox(tag)
    a = sreg(base, 0, "a")
    (x,), (y, z) = mailbox.poll(((a, out[0], 1), (sreg(base, 256, "b"), 2 * out[1], 2)))
    out[0], out[1], out[2] = x, y, z


def poll_4(base, tag, out):
    mailbox = Mailbox(tag)
    a = preg(base, 0, "a")
    (w,), (x,), (y,), (z,) = mailbox.poll(((a, out[0], 1), (a, out[1], 1), (a, out[2], 1), (a, out[3], 1)))
    out[0], out[1], out[2], out[3] = w, x, y, z


def poll_12(base, tag, out):
    mailbox = Mailbox(tag)
    a = sreg(base, 0, "a")
    w = mailbox.poll(
        (
            (a, out[0], 1),
            (a, out[1], 1),
            (a, out[2], 1),
            (a, out[3], 1),
            (a, out[4], 1),
            (a, out[5], 1),
            (a, out[6], 1),
            (a, out[7], 1),
            (a, out[8], 1),
            (a, out[9], 1),
            (a, out[10], 1),
            (a, out[11], 1),
        )
    )
    out[0] = w[0][0] + w[1][0] + w[2][0] + w[3][0] + w[4][0] + w[5][0]
    out[1] = w[6][0] + w[7][0] + w[8][0] + w[9][0] + w[10][0] + w[11][0]


@pytest.mark.parametrize(
    ("kernel", "loads", "scope"), [(poll_1, 1, "gpu"), (poll_2, 2, "gpu"), (poll_4, 4, "sys"), (poll_12, 12, "gpu")]
)
def test_a_poll_is_one_block_of_loads_and_one_branch(kernel, loads, scope):
    body = compiled(kernel, ADDRESS, TAG, WORDS)
    polling = [block for block in blocks(body) if any(LOAD.search(line) for line in block)]
    assert len(polling) == 1
    (block,) = polling
    at = [index for index, line in enumerate(block) if LOAD.search(line)]
    assert len(at) == loads
    assert {LOAD.search(block[index])[1] for index in at} == {scope}
    assert [block[index] for index in range(at[0], at[-1] + 1)] == [block[index] for index in at], "all loads together"
    assert len([line for line in block if "bra" in line]) == 1
    compares = [index for index, line in enumerate(block) if line.startswith(("setp", "xor"))]
    assert all(index > at[-1] for index in compares), "loads before compares"
    assert ".local" not in body


@pytest.mark.parametrize("kernel", [poll_1, poll_2, poll_4, poll_12])
def test_a_poll_takes_no_local_memory_and_few_registers(kernel):
    used, stack = registers(kernel, ADDRESS, TAG, WORDS)
    assert stack == 0
    assert used <= 64


def bounded(base, tag, out, control):
    mailbox = Mailbox(tag, control)
    w = mailbox.poll_each(sreg(base, 0, "a"), 0, 1, 12, 1)
    out[0] = w[0][0] + w[1][0] + w[2][0] + w[3][0] + w[4][0] + w[5][0]
    out[1] = w[6][0] + w[7][0] + w[8][0] + w[9][0] + w[10][0] + w[11][0]


def test_a_deadline_costs_nothing_while_the_first_round_is_fresh():
    found = blocks(compiled(bounded, ADDRESS, TAG, WORDS, ADDRESS))
    polling = [block for block in found if sum(bool(LOAD.search(line)) for line in block) > 1]
    assert len(polling) == 1
    assert len([line for line in polling[0] if "ld." in line]) == 12
    before = found[: found.index(polling[0]) + 1]
    assert not any("globaltimer" in line or "atom" in line for block in before for line in block)
    used, stack = registers(bounded, ADDRESS, TAG, WORDS, ADDRESS)
    assert stack == 0
    assert used <= 80


def long_poll(base, tag, out):
    mailbox = Mailbox(tag)
    w = mailbox.poll_each(sreg(base, 0, "a"), 0, 2, 20, 2)
    for k in range(20):
        out[2 * k] = w[k][0]
        out[2 * k + 1] = w[k][1]


def test_a_long_poll_is_cut_into_batches():
    polling = [
        sum(bool(LOAD.search(line)) for line in block)
        for block in blocks(compiled(long_poll, ADDRESS, TAG, WORDS))
        if any(LOAD.search(line) for line in block)
    ]
    assert polling == [POLL_MAX // 2, POLL_MAX // 2, 4]


def empty(base, tag, out):
    nothing = Mailbox(tag).poll(())
    none = Mailbox(tag).poll_each(sreg(base, 0, "a"), 0, 1, 0, 1)
    out[0] = len(nothing) + len(none)


def test_an_empty_poll_returns_nothing():
    body = compiled(empty, ADDRESS, TAG, WORDS)
    assert not LOAD.search(body)


def puts(base, peer, tag, words, floats):
    mailbox = Mailbox(tag)
    s, p = sreg(base, 0, "s"), preg(peer, 0, "p")
    mailbox.put(s, 0, floats[0])
    mailbox.put(p, 1, words[0])
    mailbox.put_words(s, 2, (words[0],))
    mailbox.put_words(p, 4, (words[0], words[1]))
    mailbox.put_bf(s, 8, (floats[0], floats[1]))
    mailbox.put_bf(p, 16, (floats[0], floats[1], floats[2], floats[3]))


def test_a_put_is_one_store_at_the_scope_of_its_space():
    body = compiled(puts, ADDRESS, ADDRESS, TAG, WORDS, FLOATS)
    stores = re.findall(r"st\.relaxed\.(\w+)\.global\.((?:v2\.)?b64)", body)
    assert stores == [
        ("gpu", "b64"),
        ("sys", "b64"),
        ("gpu", "b64"),
        ("sys", "v2.b64"),
        ("gpu", "b64"),
        ("sys", "v2.b64"),
    ]
    assert body.count("cvt.rn.bf16x2.f32") == 3


def announce(base, peer, tag, words):
    mailbox = Mailbox(tag)
    words[1] = words[0]
    publish(mailbox, sreg(base, 0, "s"), 0, words[0], 3)
    publish(mailbox, preg(peer, 0, "p"), 0, words[0], 3)


def test_publish_is_a_barrier_then_a_fence_then_a_put():
    body = compiled(announce, ADDRESS, ADDRESS, TAG, WORDS)
    order = re.findall(r"bar\.sync|fence\.acq_rel\.\w+|st\.relaxed\.\w+\.global\.b64|st\.global", body)
    assert order == [
        "st.global",
        *("bar.sync", "fence.acq_rel.gpu", "st.relaxed.gpu.global.b64"),
        *("bar.sync", "fence.acq_rel.sys", "st.relaxed.sys.global.b64"),
    ]
    text = "\n".join(line for line in body.splitlines() if line.strip())
    inline = re.findall(r"// begin inline asm\n(.*?)// end inline asm", text, re.S)
    assert not any("bar." in each for each in inline), "the barrier is numba's own, which is convergent"


def acquiring(base, tag, words):
    mailbox = Mailbox(tag)
    ((a,),) = mailbox.poll(((preg(base, 0, "p"), 0, 1),), acquire=True)
    words[0] = a + words[1]


def test_an_acquiring_poll_fences_before_later_reads():
    body = compiled(acquiring, ADDRESS, TAG, WORDS)
    assert re.findall(r"ld\.relaxed\.sys|fence\.acq_rel\.\w+|ld\.global", body) == [
        "ld.relaxed.sys",
        "fence.acq_rel.sys",
        "ld.global",
    ]


def through_the_module(base, tag, out):
    mailbox = module.Mailbox(tag)
    ((a, b),) = mailbox.poll(specs=((module.sreg(base, 0, "a"), 0, 2),), acquire=False)
    x, y = bf_of(a)
    out[0] = x + y + float_of(b)
    out[1] = int_of(b)


def test_names_resolve_through_the_module_and_by_keyword():
    body = compiled(through_the_module, ADDRESS, TAG, FLOATS)
    assert LOAD.search(body)
    assert "fence" not in body


# What is refused, and what the message says


def mixed(base, peer, tag, x):
    Mailbox(tag).poll(((sreg(base, 0, "partials"), 0, 1), (preg(peer, 0, "inbox"), 0, 1)))


def int64(base, peer, tag, x):
    Mailbox(tag).put(sreg(base, 0, "s"), 0, x[0] * x[1])


def float64(base, peer, tag, x):
    Mailbox(tag).put(sreg(base, 0, "s"), 0, x[0] / x[1])


def float_word(base, peer, tag, x):
    Mailbox(tag).put_words(sreg(base, 0, "s"), 0, (np.float32(x[0]),))


def wide_word(base, peer, tag, x):
    Mailbox(tag).put_words(sreg(base, 0, "s"), 0, (x[0] + x[1],))


def three_words(base, peer, tag, x):
    Mailbox(tag).put_words(sreg(base, 0, "s"), 0, (x[0], x[1], x[2]))


def odd_words(base, peer, tag, x):
    Mailbox(tag).put_words(sreg(base, 0, "s"), 1, (x[0], x[1]))


def odd_poll(base, peer, tag, x):
    Mailbox(tag).poll(((sreg(base, 0, "s"), 3, 2),))


def odd_stride(base, peer, tag, x):
    Mailbox(tag).poll_each(sreg(base, 0, "s"), 0, 3, 4, 2)


def misaligned_elements(base, peer, tag, x):
    y = np.float32(x[0])
    Mailbox(tag).put_bf(sreg(base, 0, "s"), 2, (y, y, y, y))


def three_elements(base, peer, tag, x):
    y = np.float32(x[0])
    Mailbox(tag).put_bf(sreg(base, 0, "s"), 0, (y, y, y))


def double_elements(base, peer, tag, x):
    Mailbox(tag).put_bf(sreg(base, 0, "s"), 0, (x[0] / 3, x[1] / 3))


def three_pairs(base, peer, tag, x):
    Mailbox(tag).poll(((sreg(base, 0, "s"), 0, 3),))


def count_from_memory(base, peer, tag, x):
    Mailbox(tag).poll(((sreg(base, 0, "s"), 0, x[0]),))


def sources_from_memory(base, peer, tag, x):
    Mailbox(tag).poll_each(sreg(base, 0, "s"), 0, 1, x[0], 1)


def joined_specs(base, peer, tag, x):
    a = sreg(base, 0, "s")
    Mailbox(tag).poll(((a, 0, 1),) + ((a, 1, 1),))  # noqa: RUF005


def misaligned_region(base, peer, tag, x):
    Mailbox(tag).put(sreg(base, 24, "s"), 0, x[0])


def nameless_region(base, peer, tag, x):
    Mailbox(tag).put(sreg(base, 0, x[0]), 0, x[0])


def short_base(base, peer, tag, x):
    Mailbox(tag).put(sreg(x[0], 0, "s"), 0, x[0])


def plain_address(base, peer, tag, x):
    Mailbox(tag).put(base, 0, x[0])


def zero_tag(base, peer, tag, x):
    Mailbox(0).put(sreg(base, 0, "s"), 0, x[0])


def wide_tag(base, peer, tag, x):
    Mailbox(tag + 1).put(sreg(base, 0, "s"), 0, x[0])


def missing_argument(base, peer, tag, x):
    Mailbox(tag).put(sreg(base, 0, "s"), 0)


def a_list(base, peer, tag, x):
    Mailbox(tag).poll([(sreg(base, 0, "s"), 0, 1)])


def no_mailbox(base, peer, tag, x):
    publish(tag, sreg(base, 0, "s"), 0, x[0], 0)


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (mixed, r"scratch region 'partials' and peer region 'inbox' are of two spaces.*\(gpu and sys\)"),
        (int64, r"the value is int64, but a pair holds 32 bits; cast it: np\.int32\(v\) or np\.uint32\(v\)"),
        (float64, r"the value is float64.*np\.float32\(v\)"),
        (float_word, r"a word is float32, but words are int32 or uint32 .*cast it"),
        (wide_word, r"a word is int64.*np\.int32\(w\)"),
        (three_words, "a tuple of 1 or 2 words"),
        (odd_words, "i is 1, but two pairs in one access want a multiple of 2"),
        (odd_poll, "a pair index of scratch region 's' is 3, .* multiple of 2"),
        (odd_stride, "stride is 3"),
        (misaligned_elements, "element i is 2, but 4 elements in one access want a multiple of 4"),
        (three_elements, "2 or 4 float32"),
        (double_elements, r"float64.*cast it: np\.float32\(x\)"),
        (three_pairs, "3 pairs, but one access holds 1 or 2"),
        (count_from_memory, "the number of pairs must be a constant"),
        (joined_specs, "the number of pairs must be a constant"),  # numba's sum of tuples forgets constants
        (sources_from_memory, "the number of sources must be a constant"),
        (misaligned_region, "the offset of region 's' is 24, but regions want a multiple of 16"),
        (nameless_region, "region must be a string constant"),
        (short_base, "base must be a 64-bit address"),
        (plain_address, r"the address must come from sreg\(...\) or preg\(...\)"),
        (zero_tag, "the tag is 0"),
        (wide_tag, "the tag is .*int64.*32 bits"),
        (missing_argument, r"Mailbox.put\(addr, i, v\): missing a required argument: 'v'"),
        (a_list, "specs must be a tuple"),
        (no_mailbox, "the first argument must be a Mailbox"),
    ],
)
def test_misuse_is_refused_with_what_to_do(kernel, says):
    with pytest.raises(TypingError) as caught:
        compiled(kernel, ADDRESS, ADDRESS, TAG, types.int32[::1])
    message = str(caught.value)
    assert re.search(says, message), message
    assert "No implementation of function" not in message, "numba's own list of attempts buries ours"


def test_device_names_are_refused_on_the_host():
    for call in (lambda: sreg(0, 0, "s"), lambda: preg(0, 0, "p"), lambda: Mailbox(1), lambda: float_of(1)):
        with pytest.raises(TypeError, match=r"numba\.cuda kernels"):
            call()
