"""Unsafe or wrong settings give one line on standard error: status 2 for options, else 1."""

import signal
import socket

import pytest

from refit_mx import ControlClient


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_public_address_is_refused_without_a_token(refused, certificate, host):
    pair = certificate("refit")
    message = refused("--address", f"{host}:0", *pair.options)
    assert "and a token" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[::ffff:127.0.0.1]"])
def test_public_address_is_refused_without_tls(refused, host):
    message = refused("--address", f"{host}:0")
    assert "set a TLS certificate and key" in message


def test_port_in_use_is_one_clear_error(failed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = failed("--address", f"127.0.0.1:{port}")
    in_use = "Address already in use"
    assert message == f"refit-server: cannot listen on 127.0.0.1:{port}: {in_use}\n"


def test_two_servers_never_share_a_port(start, failed):
    first = start()
    message = failed("--address", first.address)
    assert "Address already in use" in message


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
    message = refused("--address", address)
    assert f"address {address!r}; expected HOST:PORT" in message


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_unknown_host_is_refused(refused, host):
    message = refused("--address", f"{host}:1")
    assert "the host is unknown" in message


def test_host_name_is_resolved_before_it_is_checked(start):
    assert start("--address", "localhost:0").address.startswith(("127.0.0.1:", "[::1]:"))


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_half_of_the_tls_options_is_refused(refused, option):
    message = refused("--address", "127.0.0.1:0", option, "file.pem")
    assert "expected both or neither" in message


@pytest.mark.parametrize("option", ["--forget-after-s", "--max-ttl-s", "--restart-grace-s"])
def test_infinite_duration_is_refused(refused, option):
    message = refused("--address", "127.0.0.1:0", option, "inf")
    assert message.startswith(f"refit-server: {option}: ")


def tls(pair):
    return ("--address", "127.0.0.1:0", *pair.options)


def test_missing_tls_files_are_refused(refused, tmp_path, certificate):
    pair = certificate("refit")
    pair.key = tmp_path / "nowhere.key"
    message = refused(*tls(pair))
    assert "nowhere.key" in message


def test_key_of_another_certificate_is_refused(refused, certificate):
    pair = certificate("refit")
    pair.key = certificate("other").key
    message = refused(*tls(pair))
    assert "other.key" in message


def test_key_with_a_passphrase_is_refused_without_asking_for_it(refused, certificate):
    message = refused(*tls(certificate("refit", passphrase="unknown")))
    assert "passphrase" in message


@pytest.mark.parametrize("content", ["", "short", "two words of a long token", "ümlaut" * 5])
def test_file_without_a_token_is_refused(refused, tmp_path, content):
    file = tmp_path / "token"
    file.write_text(content)
    message = refused("--address", "127.0.0.1:0", "--token-file", str(file))
    assert message.startswith("refit-server: --token-file: ")
    assert not content or content not in message


def test_wrong_options_are_all_reported_in_one_run(refused, tmp_path):
    wrong = {
        "--retention": "-1",
        "--metrics-port": "x",
        "--grace-s": "inf",
        "--address": "nowhere",
        "--tls-cert and --tls-key": "cert.pem",
        "--token-file": str(tmp_path / "t"),
    }
    given = (text for option, value in wrong.items() for text in (option.split()[0], value))
    message = refused(*given, lines=len(wrong))
    assert [line.split(":")[1].strip() for line in message.splitlines()] == list(wrong)


def test_missing_token_file_is_refused(refused, tmp_path):
    missing = tmp_path / "nowhere.token"
    message = refused("--address", "127.0.0.1:0", "--token-file", str(missing))
    assert "nowhere.token" in message


def test_file_without_state_is_refused(failed, tmp_path):
    file = tmp_path / "state.db"
    file.write_text("this is no database, and it is longer than the header of one\n" * 20)
    message = failed("--address", "127.0.0.1:0", "--state", str(file))
    assert "state.db" in message


def test_state_with_a_damaged_page_is_refused(start, failed, tmp_path):
    file = tmp_path / "state.db"
    server = start("--state", str(file))
    with ControlClient(server.address) as client:
        for n in range(200):
            client.create_version("m", (f"slot-{n}",), idempotency_key=f"{n}")
    server.signal(signal.SIGTERM)
    assert server.wait()[0] == 0
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + b"\xff" * 4096 + data[len(data) // 2 + 4096 :])
    message = failed("--address", "127.0.0.1:0", "--state", str(file))
    assert "is damaged" in message


def test_state_in_use_is_refused(start, failed, tmp_path):
    file = tmp_path / "state.db"
    start("--state", str(file))
    message = failed("--address", "127.0.0.1:0", "--state", str(file))
    assert "in use by another server" in message


def test_metrics_port_in_use_is_refused(failed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = failed("--address", "127.0.0.1:0", "--metrics-port", port)
    assert "for metrics: Address already in use" in message
