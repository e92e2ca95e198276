"""Floats as the integers that they are in memory, and back, in a register.

An array seen as floats and as integers at once would do too, but LLVM must then keep the order of what is read and
written, and uses no vectors.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["bits_of", "float_of"]


@intrinsic
def _bits_of(typing_context: Any, value: Any) -> Any:  # noqa: ARG001 - the signature is numba's
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _float_of(typing_context: Any, word: Any) -> Any:  # noqa: ARG001 - the signature is numba's
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


bits_of: Final[Any] = _bits_of
"""The bits of an f32, as int32."""
float_of: Final[Any] = _float_of
"""The f32 of these bits, of an int32."""
