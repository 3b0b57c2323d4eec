"""Recognises secrets: by the name of an environment variable, by the form of a value, and by its place in a URL."""

from __future__ import annotations

import re

# In a name of a variable, or of a parameter of a URL, in upper case. A tokenizer and an author are none.
_WORDS = re.compile(
    r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIAL|SIGNATURE|AUTH(?!OR(?!I[SZ]))|BEARER|COOKIE"
    r"|(?<![A-Z])(?:PAT|CREDS?|JWT)(?![A-Z])|(?<![A-Z])(?:PASS|SIG)$"
)
# The partition of an InfiniBand network (NCCL_IB_PKEY, UCX_IB_PKEY), a setting of Numba, and the working directory.
_NO_SECRET = re.compile(r".*_PKEY|NUMBA_LLVM_REFPRUNE_PASS|(?:OLD)?PWD")
# s3://KEY:SECRET@bucket/a, where the secret may contain a slash, but no port: hdfs://HOST:8020/a@b. Neither
# github://OWNER:REPOSITORY@BRANCH/a nor the "::" of zip://a.zip::file:///b@c has a password.
_PASSWORD = re.compile(r"\b(?!git(?:hub)?:)\w+://[^/?#@:\s]*:(?!:|\d{1,5}/)[^@\s]+@")
_USER_OF_WEB = re.compile(r"\bhttps?://[^/?#@\s]*@")  # often a token alone, as in https://ghp_abc@github.com/
_PARAMETER = re.compile(r"[?&#]([^=&#?/]*)=")
# Tokens as services make them: Hugging Face, GitHub, GitLab, OpenAI and others, Slack, AWS, Google, Databricks, JWT.
_TOKEN = re.compile(
    r"(?<![\w/.-])(?:(?:hf|api_org|gh[opsur]|github_pat|glpat|sk|xox[abprs])[_-][A-Za-z0-9_-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|dapi[0-9a-f]{32}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|(?i:\b(?:bearer|basic)\s+[\w+/=.~-]{8,})|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_WORD = re.compile(r"[A-Za-z0-9+_=-]{20,}")  # a value without spaces, and no path, list or address


def is_secret(variable: str) -> bool:
    """Return whether an environment variable of this name looks like a secret."""
    return bool(_WORDS.search(variable.upper())) and not _NO_SECRET.fullmatch(variable)


def is_secret_value(text: str) -> bool:
    """Return whether a value looks like a secret, whatever its name: a URL with one, a known token, or random letters.

    Random is a word of at least 20 letters with digits in both cases, or of 32 hexadecimal digits.
    """
    if has_secret(text) or _TOKEN.search(text):
        return True
    text = text.strip()
    mixed = all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return bool(_WORD.fullmatch(text)) and (mixed or bool(re.fullmatch(r"[0-9a-fA-F]{32,}", text)))


def has_secret(text: str) -> bool:
    """Return whether a text has a URL with a password, or with a signature or token among its parameters."""
    if _PASSWORD.search(text) or _USER_OF_WEB.search(text):
        return True
    parameters = _PARAMETER.findall(text.partition("://")[2])
    return any(_WORDS.search(parameter.upper()) for parameter in parameters)
