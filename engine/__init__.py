"""ByteScale."""

from engine import warned as warned
