"""What ``benchmarks/memory.py`` is made of; ``tests/test_checkpoint.py`` uses the same."""
