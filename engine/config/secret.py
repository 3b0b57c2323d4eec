"""Recognises secrets: names of environment variables that have one, and URLs that contain one."""

from __future__ import annotations

import re

_WORDS = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL")  # but a tokenizer is none
_NO_SECRET = ("_PKEY",)  # NCCL_IB_PKEY and UCX_IB_PKEY name the partition of an InfiniBand network
# A password, as in s3://KEY:SECRET@bucket/a. github://OWNER:REPOSITORY@BRANCH/a has none.
_PASSWORD = re.compile(r"\b(?!git(?:hub)?:)\w+://[^/?#@]*:[^/?#@]+@")
_SIGNATURE = re.compile(r"://.*[?&](?:sig|key|[\w-]*(?:signature|token|secret|password|credential))=", re.IGNORECASE)


def is_secret(variable: str) -> bool:
    """Return whether an environment variable of this name looks like a secret."""
    return bool(_WORDS.search(variable.upper())) and not variable.endswith(_NO_SECRET)


def has_secret(text: str) -> bool:
    """Return whether a text has a URL with a password, or with a signature or token among its parameters."""
    return bool(_PASSWORD.search(text) or _SIGNATURE.search(text))
