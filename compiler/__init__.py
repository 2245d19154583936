"""The compiler: from a model file to an artifact. Start at ``cli.py``."""

from . import lazy_imports

lazy_imports.install()
