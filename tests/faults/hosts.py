"""Hosts on one machine: network namespaces that are connected by a bridge and can be cut off.

The bridge has a separate namespace, so that nothing reaches the network of the machine.
"""

import ctypes
import os
import re
import shutil
import subprocess
from contextlib import suppress

PREFIX = "spherenet-test"
CLONE_NEWNET = 0x40000000


def ip(*arguments):
    """Run `ip`; raise CalledProcessError with its message on stderr."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30).stdout


class NotPermittedError(Exception):
    """Namespaces cannot be created on this machine; the message has the reason."""


class Hosts:
    """Network namespaces with the addresses 10.77.0.1, 10.77.0.2, …, each with one interface, `eth0`."""

    def __init__(self, count):
        if shutil.which("ip") is None:
            raise NotPermittedError("iproute2 is not installed")
        self.count, name = count, f"{PREFIX}-{os.getpid()}"
        self.switch, self.names = f"{name}-switch", [f"{name}-{host}" for host in range(count)]
        try:
            self._create()
        except (subprocess.SubprocessError, OSError) as error:
            self.close()
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
            raise NotPermittedError(f"network namespaces are not permitted ({reason})") from None

    def _create(self):
        remove_leftovers()
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth",
               "peer", "name", f"port{host}", "netns", self.switch)  # fmt: skip
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
            # TCP gives up a connection after about 13 s without a reply instead of 15 minutes: some requests of
            # torchrun have no timeout.
            ip("netns", "exec", name, "sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2")

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def cut_off(self, host):
        """Disconnect a host. Its packets and those sent to it are lost; no connection is closed."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def connect(self, host):
        ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def close(self):
        """Remove all namespaces, with their interfaces."""
        for name in (*self.names, self.switch):
            with suppress(subprocess.SubprocessError, OSError):
                ip("netns", "delete", name)


def remove_leftovers():
    """Remove the namespaces of test processes that were killed."""
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\w+)", ip("netns", "list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{pid}"):
            with suppress(subprocess.SubprocessError):
                ip("netns", "delete", name)


def enter(name):
    """Move this process, which has one thread, to a host."""
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{name} cannot be entered")
    finally:
        os.close(handle)
