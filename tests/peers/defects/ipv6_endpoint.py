"""An IPv6 endpoint without brackets is parsed as another host and port."""

from __future__ import annotations

from .stage import Evidence, present


def show() -> Evidence:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    given = ("::1", "fe80::1")
    taken = [parse_rendezvous_endpoint(one, 29400) for one in given]
    return Evidence(
        taken == [(":", 1), ("fe80:", 1)],
        "; ".join(f"{one} is taken for host {host!r}, port {port}"
                  for one, (host, port) in zip(given, taken, strict=True)),
    )  # fmt: skip


if __name__ == "__main__":
    present(show)
