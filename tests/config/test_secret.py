"""What looks like a secret stays out of the run folder, and on this host; what does not is left alone."""

from __future__ import annotations

import pytest

from engine.config.secret import has_secret, is_secret


@pytest.mark.parametrize(
    "url",
    [
        *(f"https://host/a?version=2&{name}=x" for name in ("api_key", "secret_key", "access_key", "apikey", "key")),
        *(f"https://host/a?{name}=x" for name in ("passwd", "pass", "pwd", "auth", "sig", "X-Amz-Signature")),
        *(f"https://host/a?{name}=x" for name in ("X-Amz-Credential", "Authorization", "access_token_v2")),
        "https://host/a#access_token=x",
        "https://ghp_x@github.com/a",
        "https://user:word@host/a",
        "s3://AKIA:abc/def@bucket/a",
        "s3://AKIA:abc@bucket",
        "simplecache::s3://AKIA:abc@bucket/a",
        "redis://:word@host/0",
    ],
)
def test_a_url_with_a_secret(url: str) -> None:
    assert has_secret(url) and has_secret(f"first, {url}")


@pytest.mark.parametrize(
    "text",
    [
        *("data/a?key=b", "s3://bucket/run", "s3://bucket/a@b", "https://host:8080/a@b", "hdfs://host:8020/user/a@b"),
        *(
            "github://owner:repository@main/a",
            "hf://datasets/a/b@main/c",
            "abfs://container@account/a",
            "ssh://me@host/",
        ),
        *("zip://*.txt::file:///a@b.zip", "zip://a.txt::file:///a@b.zip", "s3://bucket/part?/key=3/x"),
        *("https://host/a?versionId=3&partNumber=2", "https://host/a?design=b&author=c&tokenizer=d#bypass=e"),
    ],
)
def test_a_text_without_a_secret(text: str) -> None:
    assert not has_secret(text)


@pytest.mark.parametrize(
    "variable",
    ["HF_TOKEN", "NCCL_API_KEY", "MY_AUTH", "GIT_AUTHORIZATION", "MY_PASSPHRASE", "DB_PASS", "DB_PWD", "db_passwd"],
)
def test_a_variable_with_a_secret(variable: str) -> None:
    assert is_secret(variable)


@pytest.mark.parametrize(
    "variable",
    [
        *("PWD", "OLDPWD", "NCCL_IB_PKEY", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "NUMBA_LLVM_REFPRUNE_PASS"),
        *("NUMBA_LLVM_PASS_TIMINGS", "TORCHINDUCTOR_DISABLED_PASSES", "NCCL_BYPASS", "HF_HOME"),
    ],
)
def test_a_variable_without_a_secret(variable: str) -> None:
    """Ranks of other hosts need the settings of libraries, and recipes the working directory."""
    assert not is_secret(variable)
