"""PTX text to native code.

`load` parses the text, translates each kernel to a state machine in LLVM IR, and compiles it (or finds it in the
cache of objects).
"""

from __future__ import annotations

from .module import Kernel, Module, Param, Variable, load

__all__ = ["Kernel", "Module", "Param", "Variable", "load"]
