"""Recognises secrets: names of environment variables that have one, and URLs that contain one."""

from __future__ import annotations

import re

# In a name of a variable, or of a parameter of a URL, in upper case. A tokenizer and an author are none.
_WORDS = re.compile(
    r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|SIGNATURE|AUTH(?!OR(?!I[SZ]))"
    r"|(?<![A-Z])(?:PASS|SIG)$"
)
# The partition of an InfiniBand network (NCCL_IB_PKEY, UCX_IB_PKEY), a setting of Numba, and the working directory.
_NO_SECRET = re.compile(r".*_PKEY|NUMBA_LLVM_REFPRUNE_PASS|(?:OLD)?PWD")
# s3://KEY:SECRET@bucket/a, where the secret may contain a slash, but no port: hdfs://HOST:8020/a@b. Neither
# github://OWNER:REPOSITORY@BRANCH/a nor the "::" of zip://a.zip::file:///b@c has a password.
_PASSWORD = re.compile(r"\b(?!git(?:hub)?:)\w+://[^/?#@:\s]*:(?!:|\d{1,5}/)[^@\s]+@")
_USER_OF_WEB = re.compile(r"\bhttps?://[^/?#@\s]*@")  # often a token alone, as in https://ghp_abc@github.com/
_PARAMETER = re.compile(r"[?&#]([^=&#?/]*)=")


def is_secret(variable: str) -> bool:
    """Return whether an environment variable of this name looks like a secret."""
    return bool(_WORDS.search(variable.upper())) and not _NO_SECRET.fullmatch(variable)


def has_secret(text: str) -> bool:
    """Return whether a text has a URL with a password, or with a signature or token among its parameters."""
    if _PASSWORD.search(text) or _USER_OF_WEB.search(text):
        return True
    parameters = _PARAMETER.findall(text.partition("://")[2])
    return any(_WORDS.search(parameter.upper()) for parameter in parameters)
