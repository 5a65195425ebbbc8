"""Collectives: all-gathers that a Python program can call without a framework."""

from .allgather import LamportAllGather
from .base import AllGather, PreparedCall
from .tagged import TaggedAllGather

__all__ = ["AllGather", "LamportAllGather", "PreparedCall", "TaggedAllGather"]
