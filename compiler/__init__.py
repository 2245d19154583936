"""The compiler: from a model file to an artifact. Start at ``cli.py``."""

from .lazy_imports import defer

defer("sympy", "onnx_ir._symbolic_shapes")
