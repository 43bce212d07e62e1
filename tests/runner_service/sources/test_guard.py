"""Which addresses a fetch may connect to. Every other connection is refused."""

import ipaddress
import socket
import subprocess
import sys

import pytest

from motet.errors import AdapterFetchFailed
from motet_runner.sources.network_guard import NetworkGuard, is_public

INSIDE = [
    "127.0.0.1", "127.255.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "100.100.100.200", "168.63.129.16", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "192.0.0.192",
    "198.18.0.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1",
    "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:db8::1",
    "64:ff9b:1::1", "fec0::1", "2001::1", "100::1",
    "::7f00:1", "::a00:1", "::ffff:0:7f00:1", "100:0:0:1::1", "4000::1",
]  # fmt: skip
OUTSIDE = [
    "1.1.1.1",
    "151.101.1.1",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "::ffff:1.1.1.1",
    "64:ff9b::101:101",
]


@pytest.mark.parametrize("address", INSIDE)
def test_row_33_a_private_address_is_not_public(address):
    assert not is_public(ipaddress.ip_address(address))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(AdapterFetchFailed, match="not a public address"):
        NetworkGuard([]).check(family, (address, 443))


@pytest.mark.parametrize("address", OUTSIDE)
def test_an_address_of_the_internet_is_public(address):
    NetworkGuard([]).check(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, 443))


@pytest.mark.parametrize("entry", ["10.0.0.0/8", "10.1.2.3", "10.1.2.3/24"])
def test_only_addresses_that_the_platform_names_are_allowed(entry):
    guard = NetworkGuard([entry])
    guard.check(socket.AF_INET, ("10.1.2.3", 443))
    guard.check(socket.AF_INET6, ("::ffff:10.1.2.3", 443, 0, 0))
    with pytest.raises(AdapterFetchFailed):
        guard.check(socket.AF_INET, ("192.168.0.1", 443))


def test_a_host_that_the_platform_names_is_allowed_at_any_address():
    NetworkGuard(["localhost"]).check(socket.AF_INET, ("127.0.0.1", 443))
    with pytest.raises(AdapterFetchFailed):
        NetworkGuard(["localhost"]).check(socket.AF_INET, ("127.0.0.2", 443))
    with pytest.raises(AdapterFetchFailed):
        NetworkGuard(["nowhere.invalid"]).check(socket.AF_INET, ("127.0.0.1", 443))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_host_may_be_allowed_at_one_port_alone(host):
    guard = NetworkGuard([(host, 9000)])
    guard.check(socket.AF_INET, ("127.0.0.1", 9000))
    assert "127.0.0.1" in guard.resolve("127.0.0.1", 9000)
    with pytest.raises(AdapterFetchFailed, match="not a public address"):
        guard.check(socket.AF_INET, ("127.0.0.1", 9001))
    with pytest.raises(AdapterFetchFailed, match="not a public address"):
        guard.resolve("127.0.0.1", 9001)


def test_sockets_of_this_machine_are_refused():
    with pytest.raises(AdapterFetchFailed, match="socket of this machine"):
        NetworkGuard(["0.0.0.0/0"]).check(socket.AF_UNIX, "/run/docker.sock")


def test_the_guard_checks_every_connection_of_the_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import asyncio, http.client, socket, sys, urllib.request\n"
            "from motet.errors import AdapterFetchFailed\n"
            "from motet_runner.sources.network_guard import NetworkGuard\n"
            "port = int(sys.argv[1]); NetworkGuard([]).install()\n"
            "async def connect(): await asyncio.open_connection('127.0.0.1', port)\n"
            "ways = [lambda: socket.create_connection(('localhost', port)),\n"
            "    lambda: socket.socket().connect_ex(('127.0.0.1', port)),\n"
            "    lambda: http.client.HTTPConnection('127.0.0.1', port).request('GET', '/'),\n"
            "    lambda: urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f'http://127.0.0.1:{port}'),\n"
            "    lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port)),\n"
            "    lambda: asyncio.run(connect())]\n"
            "for way in ways:\n"
            "    try: way()\n"
            "    except AdapterFetchFailed: continue\n"
            "    sys.exit('it got past')\n"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(port)], check=True)
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
