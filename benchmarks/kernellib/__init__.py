"""Parts of ``kernels.py``, ``layer.py`` and ``blackwell.py``."""
