"""Unsafe or wrong settings give one line on standard error and exit status 1."""

import signal
import socket

import pytest

from refit_mx import ControlClient


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_public_address_is_refused_without_a_token(refused, certificate, host):
    pair = certificate("refit")
    secrets = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    status, said = refused("--address", f"{host}:0", *secrets)
    assert (status, said.count("\n")) == (1, 1)
    assert "and a token" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[::ffff:127.0.0.1]"])
def test_public_address_is_refused_without_tls(refused, host):
    status, said = refused("--address", f"{host}:0")
    assert (status, said.count("\n")) == (1, 1)
    assert "set a TLS certificate and key" in said


def test_port_in_use_is_one_clear_error(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused("--address", f"127.0.0.1:{port}")
    in_use = "Address already in use"
    assert (status, said) == (1, f"refit-server: cannot listen on 127.0.0.1:{port}: {in_use}\n")


def test_two_servers_never_share_a_port(start, refused):
    first = start()
    status, said = refused("--address", first.address)
    assert (status, said.count("\n")) == (1, 1)
    assert "Address already in use" in said


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        ":50051",
        "127.0.0.1:",
        "127.0.0.1:http",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "::1:50051",
        "[::1:1",
        "unix:/tmp/socket",
        "dns:///localhost:1",
    ],
)
def test_address_of_another_form_is_refused(refused, address):
    status, said = refused("--address", address)
    assert (status, said.count("\n")) == (1, 1)
    assert f"address {address!r}; expected HOST:PORT" in said


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_unknown_host_is_refused(refused, host):
    status, said = refused("--address", f"{host}:1")
    assert (status, said.count("\n")) == (1, 1)
    assert "the host is unknown" in said


def test_host_name_is_resolved_before_it_is_checked(start):
    assert start("--address", "localhost:0").address.startswith(("127.0.0.1:", "[::1]:"))


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_half_of_the_tls_options_is_refused(refused, option):
    status, said = refused("--address", "127.0.0.1:0", option, "file.pem")
    assert (status, said.count("\n")) == (1, 1)
    assert "expected both or neither" in said


@pytest.mark.parametrize("option", ["--forget-after-s", "--max-ttl-s", "--restart-grace-s"])
def test_infinite_duration_is_refused(refused, option):
    status, said = refused("--address", "127.0.0.1:0", option, "inf")
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith(f"refit-server: {option}: ")


def tls(pair):
    return ("--address", "127.0.0.1:0", "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))


def test_missing_tls_files_are_refused(refused, tmp_path, certificate):
    pair = certificate("refit")
    pair.key = tmp_path / "nowhere.key"
    status, said = refused(*tls(pair))
    assert (status, said.count("\n")) == (1, 1)
    assert "nowhere.key" in said


def test_key_of_another_certificate_is_refused(refused, certificate):
    pair = certificate("refit")
    pair.key = certificate("other").key
    status, said = refused(*tls(pair))
    assert (status, said.count("\n")) == (1, 1)
    assert "other.key" in said


def test_key_with_a_passphrase_is_refused_without_asking_for_it(refused, certificate):
    status, said = refused(*tls(certificate("refit", passphrase="unknown")))
    assert (status, said.count("\n")) == (1, 1)
    assert "passphrase" in said


@pytest.mark.parametrize("content", ["", "short", "two words of a long token", "ümlaut" * 5])
def test_file_without_a_token_is_refused(refused, tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    status, said = refused("--address", "127.0.0.1:0", "--token-file", str(file))
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("refit-server: --token-file: ")
    assert not content or content not in said


def test_all_wrong_options_are_reported_together_as_typed(refused, tmp_path):
    wrong = {
        "--retention": "-1",
        "--metrics-port": "x",
        "--grace-s": "inf",
        "--address": "nowhere",
        "--tls-cert and --tls-key": "cert.pem",
        "--token-file": str(tmp_path / "t"),
    }
    given = (text for option, value in wrong.items() for text in (option.split()[0], value))
    status, said = refused(*given)
    options = [line.split(":")[1].strip() for line in said.splitlines()]
    assert (status, options) == (1, list(wrong))


def test_missing_token_file_is_refused(refused, tmp_path):
    missing = tmp_path / "nowhere.token"
    status, said = refused("--address", "127.0.0.1:0", "--token-file", str(missing))
    assert (status, said.count("\n")) == (1, 1)
    assert "nowhere.token" in said


def test_file_without_state_is_refused(refused, tmp_path):
    file = tmp_path / "state.db"
    file.write_text("this is no database, and it is longer than the header of one\n" * 20)
    status, said = refused("--address", "127.0.0.1:0", "--state", str(file))
    assert (status, said.count("\n")) == (1, 1)
    assert "state.db" in said


def test_state_with_a_damaged_page_is_refused(start, refused, tmp_path):
    file = tmp_path / "state.db"
    server = start("--state", str(file))
    with ControlClient(server.address) as client:
        for n in range(200):
            client.create_version("m", (f"slot-{n}",), idempotency_key=f"{n}")
    server.signal(signal.SIGTERM)
    assert server.wait()[0] == 0
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + b"\xff" * 4096 + data[len(data) // 2 + 4096 :])
    status, said = refused("--address", "127.0.0.1:0", "--state", str(file))
    assert (status, said.count("\n")) == (1, 1)
    assert "is damaged" in said


def test_state_in_use_is_refused(start, refused, tmp_path):
    file = tmp_path / "state.db"
    start("--state", str(file))
    status, said = refused("--address", "127.0.0.1:0", "--state", str(file))
    assert (status, said.count("\n")) == (1, 1)
    assert "in use by another server" in said


def test_metrics_port_in_use_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = refused("--address", "127.0.0.1:0", "--metrics-port", port)
    assert (status, said.count("\n")) == (1, 1)
    assert "for metrics: Address already in use" in said
