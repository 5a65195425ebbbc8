"""The names a kernel uses. They exist on the device only; numba compiles them from ``rules.py`` and ``lowering.py``."""

from __future__ import annotations

from typing import Any, NoReturn

POLL_MAX = 16
"""The most pairs that one round of a poll loads together; a longer poll is cut into batches."""


def _only_in_a_kernel(name: str) -> NoReturn:
    raise TypeError(f"{name} is for numba.cuda kernels: it has no meaning on the host")


def sreg(base: Any, offset: Any, region: str) -> Any:
    """Name an address in a scratch region: memory of this GPU, read and written by its own CTAs, at device scope.

    Args:
        base: the address of the scratch allocation, 64 bits, a multiple of 16.
        offset: bytes from there to the region, a multiple of 16.
        region: the region's name, a string constant.
    """
    _only_in_a_kernel("sreg")


def preg(base: Any, offset: Any, region: str) -> Any:
    """Name an address in a peer region: some rank's part of a symmetric allocation, at system scope.

    Args:
        base: the address of that rank's part as this rank maps it, 64 bits, a multiple of 16.
        offset: bytes from there to the region, a multiple of 16; add ``parity * stride`` for the buffer of this launch.
        region: the region's name, a string constant.
    """
    _only_in_a_kernel("preg")


def publish(mailbox: Any, addr: Any, i: Any, v: Any, who: Any) -> None:
    """Announce all plain stores of this CTA: pair ``i`` becomes (``v``, tag) after everything that its threads stored
    before.

    Every thread of the CTA must call it. It is a CTA barrier, then a fence of the region's scope by thread ``who``
    (its linear index), then that thread's put: the fence is cumulative, so one thread's is enough. A reader polls
    with ``acquire=True``.
    """
    _only_in_a_kernel("publish")


def float_of(word: Any) -> Any:
    """Return the float32 with the bits of a polled word."""
    _only_in_a_kernel("float_of")


def int_of(word: Any) -> Any:
    """Return the int32 with the bits of a polled word."""
    _only_in_a_kernel("int_of")


def bf_of(word: Any) -> Any:
    """Return, as float32, the two bf16 of a polled word: elements 2k and 2k + 1."""
    _only_in_a_kernel("bf_of")


class Mailbox:
    """A handle on tagged pairs for one launch.

    Every 32-bit value is stored beside the tag of this launch in one 8-byte access, and a consumer re-reads the pair
    until the tag matches. Nothing is ever cleared, and every bit pattern of a value is legal.

    Args:
        tag: the number of this launch from an :class:`~lamport_numba.mailbox.Epoch`, 32 bits, never 0.
        control: the address of the control block (``memory.control``) that holds the deadline. Without it a poll
            waits for ever.
    """

    def __init__(self, tag: Any, control: Any = None) -> None:
        _only_in_a_kernel("Mailbox")

    def put(self, addr: Any, i: Any, v: Any) -> None:
        """Set pair ``i`` to the bits of ``v`` (int32, uint32 or float32)."""

    def put_words(self, addr: Any, i: Any, words: Any) -> None:
        """Set the pairs from ``i`` on to one or two 32-bit integers by one store; two want an even ``i``."""

    def put_bf(self, addr: Any, i: Any, values: Any) -> None:
        """Round two or four float32 to bf16 and store them as elements from ``i`` on, two a pair, by one store.

        ``i`` counts elements and is a multiple of their number; element i lies in pair i / 2.
        """

    def poll(self, specs: Any, acquire: bool = False) -> Any:
        """Wait for pairs and return their words.

        Args:
            specs: a tuple of (address, pair index, pairs), pairs being the literal 1 or 2; all addresses of one
                space. Two pairs want an even index.
            acquire: a literal; True orders every later read of this thread after the poll, so that plain data
                announced by ``publish`` can be read.

        Returns:
            For each spec a tuple of one or two uint32. All pairs are re-read together while any tag is stale, so a
            poll costs one round trip after its last producer. When the deadline passes, the words are undefined and
            :meth:`failed` is true.
        """

    def poll_each(self, addr: Any, i: Any, stride: Any, sources: int, pairs: int, acquire: bool = False) -> Any:
        """Wait for ``pairs`` (1 or 2) at ``i``, ``i + stride``, ... for each of ``sources``, both literals.

        Returns:
            For each source a tuple of one or two uint32.
        """

    def failed(self) -> bool:
        """Tell whether a poll on this control block has run out of time, in this launch or an earlier one."""
        raise NotImplementedError
