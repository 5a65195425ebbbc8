"""The types that the mailbox adds to numba kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.cuda import types
from numba.cuda.datamodel import models as data_models
from numba.cuda.extending import register_model

SCOPES = {"scratch": "gpu", "peer": "sys"}  # space -> PTX scope of every access to it


class AddressType(types.Type):  # type: ignore[misc]
    """An address in a named region. Both are part of the type, so mixing spaces fails when a kernel is compiled."""

    def __init__(self, space: str, region: str) -> None:
        self.space = space
        self.region = region
        super().__init__(name=f"{'sreg' if space == 'scratch' else 'preg'}({region!r})")

    @property
    def scope(self) -> str:
        """The PTX scope that reaches everybody who may touch this space."""
        return SCOPES[self.space]

    def __str__(self) -> str:
        return f"{self.space} region {self.region!r}"


class MailboxType(types.Type):  # type: ignore[misc]
    """A mailbox: the tag of this launch and, if ``bounded``, the control block with the deadline."""

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded
        super().__init__(name="Mailbox(tag, control)" if bounded else "Mailbox(tag)")


class Operation(types.Callable, types.Opaque):  # type: ignore[misc]
    """A function of the mailbox. ``rule`` types a call, and its error is what the user sees."""

    def __init__(self, name: str, rule: Callable[..., Any]) -> None:
        self.operation = name
        self.rule = rule
        super().__init__(name=f"mailbox function {name}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        return self.rule(args, kws)

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        return [], False

    def get_impl_key(self, sig: Any) -> Any:
        return self.operation


class Method(types.BoundFunction):  # type: ignore[misc]
    """A method of a mailbox, typed the same way."""

    def __init__(self, name: str, rule: Callable[..., Any], this: MailboxType) -> None:
        self.operation = name
        self.rule = rule
        self.this = this
        self.typing_key = name
        types.Type.__init__(self, name=f"{name} of {this}")

    @property
    def key(self) -> Any:
        return self.operation, self.this

    def copy(self, this: Any) -> Method:
        return Method(self.operation, self.rule, this)

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        return self.rule(args, kws).replace(recvr=self.this)

    def get_call_signatures(self) -> tuple[list[Any], bool]:
        return [], False

    def get_impl_key(self, sig: Any) -> Any:
        return self.operation


@register_model(AddressType)
class _AddressModel(data_models.PrimitiveModel):  # type: ignore[misc]
    """A global-space byte address."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, dmm.lookup(types.uint64).get_value_type())


@register_model(MailboxType)
class _MailboxModel(data_models.StructModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        members = [("tag", types.uint32), ("wanted", types.uint32), ("control", types.uint64)]
        super().__init__(dmm, fe_type, members)  # polls match "wanted": the tag, but for 0


@register_model(Method)  # type: ignore[untyped-decorator]
def _method_model(dmm: Any, fe_type: Any) -> Any:
    """A bound method is its mailbox."""
    return dmm[fe_type.this]


register_model(Operation)(data_models.OpaqueModel)
