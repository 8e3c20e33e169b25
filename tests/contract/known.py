"""What the list says and vbrt does not do yet. It only shrinks.

A test fails if an operation that stands here is as listed everywhere, so that nothing stays here by mistake.
"""

__all__ = ["KNOWN_FAILURES"]

KNOWN_FAILURES: frozenset[str] = frozenset()
