"""Access to the control plane: sources of the token, trusted certificates, and no leaked token."""

import pytest

from refit_mx import (
    ControlAccess,
    ControlAccessError,
    ControlClient,
    EmbeddedControlServer,
    RefitConfigError,
    VersionNotFoundError,
)

TOKEN = "0123456789abcdef-0123456789abcdef"
ELSEWHERE = "192.0.2.1:1"


@pytest.fixture
def server():
    with EmbeddedControlServer(token=TOKEN) as running:
        yield running


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


def assert_accepted(access, server):
    with access.connect(server.address) as client, pytest.raises(VersionNotFoundError):
        client.get_version("x")


def test_token_comes_from_an_environment_variable(server, monkeypatch):
    monkeypatch.setenv("OF_A_TEST", TOKEN)
    assert_accepted(ControlAccess(token_env="OF_A_TEST"), server)


@pytest.mark.parametrize("name", ["REFIT_MX_CONTROL_TOKEN", "REFIT_MX_CONTROL_TOKEN_FILE"])
def test_environment_sets_the_token(server, token_file, monkeypatch, name):
    monkeypatch.setenv(name, token_file if name.endswith("FILE") else TOKEN)
    assert_accepted(ControlAccess.from_environment(), server)


def test_environment_sets_the_trusted_authority(monkeypatch):
    assert ControlAccess.from_environment() == ControlAccess()
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_CA", "ca.pem")
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_NAME", "refit.example")
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN", "")
    assert ControlAccess.from_environment() == ControlAccess("ca.pem", "refit.example")


def test_wrong_token_is_not_retryable(server, monkeypatch):
    monkeypatch.setenv("OF_A_TEST", TOKEN + "-of-another")
    with (
        ControlAccess(token_env="OF_A_TEST").connect(server.address) as client,
        pytest.raises(ControlAccessError, match="a valid bearer token is required") as caught,
    ):
        client.get_version("x")
    assert not caught.value.retryable
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"token_file": "a", "token_env": "B"}, "expected one of them"),
        ({"tls_name": "refit.example"}, "without tls_ca"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments, named):
    with pytest.raises(RefitConfigError, match=named):
        ControlAccess(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"token_file": "nowhere"}, "token file 'nowhere': No such file"),
        ({"token_env": "NOT_SET_BY_A_TEST"}, "NOT_SET_BY_A_TEST is not set"),
        ({"tls_ca": "nowhere"}, "tls_ca 'nowhere': No such file"),
        ({"tls_ca": __file__}, "no certificate in PEM"),
    ],
)
def test_unreadable_file_or_variable_is_refused_by_name(arguments, named):
    with pytest.raises(RefitConfigError, match=named):
        ControlAccess(**arguments).connect("127.0.0.1:1")


@pytest.mark.parametrize("text", ["", "short-secret", "two words-of-a-secret", "sécret" * 5])
@pytest.mark.parametrize("place", ["file", "env"])
def test_invalid_token_is_refused_and_not_shown(tmp_path, monkeypatch, place, text):
    file = tmp_path / "token"
    file.write_text(text)
    monkeypatch.setenv("OF_A_TEST", text)
    access = (
        ControlAccess(token_file=str(file))
        if place == "file"
        else ControlAccess(token_env="OF_A_TEST")
    )
    with pytest.raises(RefitConfigError, match=r"token.*(16 visible|not ASCII)") as caught:
        access.connect("127.0.0.1:1")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("token", ["of\nsecrets", "sécrets", "of secrets"])
def test_token_invalid_in_a_header_is_refused_and_not_shown(token, capfd):
    with pytest.raises(RefitConfigError, match="not visible ASCII") as caught:
        ControlClient("127.0.0.1:1", token=token)
    assert token not in str(caught.value) + "".join(capfd.readouterr())


def test_token_never_travels_in_the_clear(token_file):
    with pytest.raises(RefitConfigError, match="unencrypted") as caught:
        ControlAccess(token_file=token_file).connect(ELSEWHERE)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.evil.example.com:50051",
        "127.0.0.1.example.com:50051",
        "localhost.example.com:50051",
        "128.0.0.1:50051",
        "[::2]:50051",
        "::1:50051",
        "dns://example.com/127.0.0.1:50051",
    ],
)
def test_remote_machine_never_gets_an_unencrypted_token(address):
    with pytest.raises(RefitConfigError, match="unencrypted"):
        ControlClient(address, token=TOKEN)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"])
def test_local_machine_gets_a_token_without_tls(address):
    ControlClient(address, token=TOKEN).close()


def test_proxy_variables_are_ignored(server, token_file, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert_accepted(ControlAccess(token_file=token_file), server)


def test_representations_do_not_have_the_token(server, token_file):
    access = ControlAccess(token_file=token_file)
    with access.connect(server.address) as client, client.clone() as another:
        shown = [repr(each) for each in (access, client, another, client._connection)]
    assert not any(TOKEN in each for each in shown)
