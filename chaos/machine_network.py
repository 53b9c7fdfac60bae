"""Machines in their own network, connected by a switch that can cut and restore their links.

Each machine is a network, mount and host name namespace, held by a sleeping process; so is the switch.
The kernel removes a namespace with its last process, and the sleepers die with this process, so nothing
is left behind. The computer's own network does not change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time

NOWHERE = "02:00:00:00:00:99"  # An address that no interface has.
POLL_S = 0.01
PATIENCE_S = 60
SWITCH_ADDRESS = "10.77.0.254"


def missing() -> str:
    """Return why networks are impossible here, or an empty text."""
    if os.geteuid() != 0:
        return "only root can create network namespaces"
    for tool in ("ip", "nsenter", "setpriv", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed"
    probe = subprocess.run(["unshare", "-n", "-m", "-u", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


class MachineNetwork:
    """Nodes 0, 1, 2 ... at 10.77.0.1, .2, .3 ..., called node0, node1 ..., behind one switch."""

    def __init__(self, nodes: int) -> None:
        self._sleepers: list[subprocess.Popen[bytes]] = []
        try:
            self.switch = self._make_namespace()
            self._run(self.switch, "ip link add bridge type bridge")
            self._run(self.switch, f"ip address add {SWITCH_ADDRESS}/24 dev bridge")
            self._run(self.switch, "ip link set bridge up")
            self._run(self.switch, "ip link set lo up")
            self._nodes = [self._make_namespace() for _ in range(nodes)]
            for node, pid in enumerate(self._nodes):
                link = f"ip link add port{node} type veth peer name eth0 netns {pid}"
                self._run(self.switch, link)
                self._run(self.switch, f"ip link set port{node} master bridge up")
                self._run(pid, f"ip address add {address(node)}/24 dev eth0")
                self._run(pid, "ip link set eth0 up")
                self._run(pid, "ip link set lo up")
                self._run(pid, f"hostname node{node}")
        except BaseException:
            self.close()
            raise

    def inside(self, node: int) -> tuple[str, ...]:
        """Return the prefix of a command that runs on a node."""
        return _enter(self._nodes[node])

    def add_address(self, node: int, one: str) -> None:
        """Give a node another address."""
        self._run(self._nodes[node], f"ip address add {one}/24 dev eth0")

    def cut(self, node: int) -> None:
        """Unplug a node."""
        self._run(self.switch, f"ip link set port{node} down")

    def heal(self, node: int) -> None:
        """Plug it in again."""
        self._run(self.switch, f"ip link set port{node} up")

    def silence(self, node: int, to: int) -> None:
        """Drop everything that one node sends to another; the other direction works."""
        self._neighbour("replace", node, to, f"lladdr {NOWHERE} nud permanent")

    def unsilence(self, node: int, to: int) -> None:
        self._neighbour("delete", node, to, "")

    def narrow(self, node: int, bytes_max: int) -> None:
        """Silently drop packets above a size on a node's link."""
        for pid in self._nodes:  # Otherwise the kernel forwards many segments as one.
            self._run(pid, "ip link set eth0 gso_max_segs 1")
        self._run(self.switch, f"ip link set port{node} mtu {bytes_max}")

    def throttle(self, node: int, kbit_s: int) -> None:
        """Limit the rate at which a node sends; nothing is lost."""
        shape = f"tbf rate {kbit_s}kbit burst 1600 limit 10000000"
        self._run(self._nodes[node], f"tc qdisc replace dev eth0 root {shape}")

    def name(self, node: int, host: str, at: str) -> None:
        """Add a host name to one node only."""
        hosts = f"echo {at} {host} > /run/hosts && mount --bind /run/hosts /etc/hosts"
        self._run(self._nodes[node], "mount -t tmpfs none /run")
        subprocess.run([*self.inside(node), "sh", "-c", hosts], check=True)

    def close(self) -> None:
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait(PATIENCE_S)

    def _neighbour(self, verb: str, node: int, to: int, how: str) -> None:
        self._run(self._nodes[node], f"ip neighbour {verb} {address(to)} {how} dev eth0")

    def _make_namespace(self) -> int:
        """Return a process that holds its own network, mounts and host name."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-n", "-m", "-u"]
        sleeper = subprocess.Popen([*command, "sleep", "infinity"])
        self._sleepers.append(sleeper)
        deadline = time.monotonic() + PATIENCE_S
        while os.readlink(f"/proc/{sleeper.pid}/exe").rpartition("/")[2] != "sleep":
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        return sleeper.pid

    def _run(self, pid: int, command: str) -> None:
        words = [*_enter(pid), *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def _enter(pid: int) -> tuple[str, ...]:
    return ("nsenter", "-t", str(pid), "-n", "-m", "-u")
