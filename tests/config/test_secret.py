"""What looks like a secret stays out of the run folder, and on this host; what does not is left alone."""

from __future__ import annotations

import pytest

from engine.config.secret import has_secret, is_secret, is_secret_value


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
    [
        "HF_TOKEN",
        "NCCL_API_KEY",
        "HF_HUB_BEARER",
        "DS_ACCESS_PAT",
        "AWS_CREDS",
        "MY_AUTH",
        "GIT_AUTHORIZATION",
        "MY_PASSPHRASE",
        "DB_PASS",
        "DB_PWD",
        "db_passwd",
    ],
)
def test_a_variable_with_a_secret(variable: str) -> None:
    assert is_secret(variable)


@pytest.mark.parametrize(
    "variable",
    [
        *("PWD", "OLDPWD", "NCCL_IB_PKEY", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "NUMBA_LLVM_REFPRUNE_PASS"),
        *(
            "NUMBA_LLVM_PASS_TIMINGS",
            "PATH",
            "NCCL_PATTERN",
            "TORCH_PATCH",
            "TORCHINDUCTOR_DISABLED_PASSES",
            "NCCL_BYPASS",
            "HF_HOME",
        ),
    ],
)
def test_a_variable_without_a_secret(variable: str) -> None:
    """Ranks of other hosts need the settings of libraries, and recipes the working directory."""
    assert not is_secret(variable)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "https://user:word@host/hf",
            "hf_abcdefghijklmnopqrst",
            "x github_pat_0123456789abcdef y",
            "AKIAABCDEFGHIJKLMNOP",
        ),
        *("glpat-abcdefghij0123456789", "sk-proj-0123456789abcdef", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl"),
        *("Authorization: Bearer abcdefgh", "-----BEGIN RSA PRIVATE KEY-----", "dapi0123456789abcdef0123456789abcdef"),
        *("0123456789abcdef0123456789abcdef", "aB3dE5gH7jK9mN1pQ3rS5tU7"),
    ],
)
def test_a_value_that_is_a_secret_whatever_its_name(value: str) -> None:
    assert is_secret_value(value)


@pytest.mark.parametrize(
    "value",
    [
        *("", "1", "INFO", "ib0,eth1", "=mlx5_0:1,mlx5_1:1", "expandable_segments:True", "10.0.0.1:29500", "Ring,Tree"),
        *(
            "/opt/lib:/opt/lib64",
            "/home/Me1/.cache/huggingface/Models2024",
            "https://mirror.example/hf",
            "rc_mlx5,sm,self",
        ),
        "/cache/sk-learn-of-2024-05-06",
        *("granularity=fine,compact,1,0", "max-autotune-no-cudagraphs", "GPU-8f3bd1a2-12", "s3://bucket/run"),
        *("TENSOR_CORE_ONLY_WHEN_ALLOWED", "basic", "sk-1"),
    ],
)
def test_a_value_that_is_a_setting(value: str) -> None:
    assert not is_secret_value(value)
