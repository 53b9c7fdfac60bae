"""Real agents and an etcd with access control: certificates, users and passwords."""

from __future__ import annotations

from typing import TYPE_CHECKING

from certificates import make_ca, make_certificate
from etcd_teams import EtcdTeam
from real_etcd import make_tls, running_etcd
from real_teams import OBEY, QUICK

if TYPE_CHECKING:
    from pathlib import Path

USER, PASSWORD = "trainer", "s3cret"
SECRETS = {"HOLDFAST_ETCD_USER": USER, "HOLDFAST_ETCD_PASSWORD": PASSWORD}


def refusal_of(cluster: EtcdTeam, name: str) -> str:
    """Wait until an agent exits; return its only line of output."""
    code, output = cluster.agents[name].end()
    assert code == 78, output
    assert output.count("\n") == 1, output
    assert output.startswith("holdfast run: error: ")
    assert cluster.etcd.endpoint in output
    return output


def test_only_the_right_certificate_is_accepted(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    foreign = make_ca(tmp_path, "foreign-ca")
    stranger = make_certificate(foreign, "stranger")
    mine = f"cert={tls.client.cert},key={tls.client.key}"
    by_other_names = (
        f"protocol=https,ca_cert={tls.ca},ssl_cert={tls.client.cert},ssl_cert_key={tls.client.key}"
    )
    with (
        running_etcd(tmp_path, tls=tls) as etcd,
        EtcdTeam(tmp_path, OBEY, etcd=etcd, endpoint=etcd.url, nnodes="2", conf=QUICK) as cluster,
    ):
        plainly = f"--rdzv-endpoint={etcd.endpoint}"
        cluster.start("a", conf=f"cacert={tls.ca},{mine}")
        cluster.start("b", plainly, conf=by_other_names)
        starts = cluster.generation(2)
        cluster.start("bare", conf=f"cacert={tls.ca}")
        cluster.start("stranger", conf=f"cacert={tls.ca},cert={stranger.cert},key={stranger.key}")
        cluster.start("suspicious", conf=f"cacert={foreign.cert},{mine}")
        cluster.start("plain", plainly)
        cluster.start("forgetful", conf=f"cacert={tmp_path}/none.pem,{mine}")
        code, output = cluster.agents["forgetful"].end()
        assert (code, output.count("\n")) == (2, 1)
        assert output.startswith(f"holdfast run: error: --rdzv-conf: cacert: {tmp_path}/none.pem")
        for name in ("bare", "stranger"):
            assert "client certificate" in refusal_of(cluster, name)
        assert "not trusted" in refusal_of(cluster, "suspicious")
        assert "write https://" in refusal_of(cluster, "plain")
        assert cluster.is_quiet()
        codes = cluster.finish(starts)
        assert (codes["a"], codes["b"]) == (0, 0)


def test_only_the_right_password_is_accepted(tmp_path: Path) -> None:
    with (
        running_etcd(tmp_path) as etcd,
        EtcdTeam(tmp_path, OBEY, etcd=etcd, nnodes="2", conf=QUICK) as cluster,
    ):
        etcd.enable_auth(USER, PASSWORD, f"{cluster.prefix}/".encode())
        cluster.start("a", env=SECRETS)
        cluster.start("b", conf=f"user={USER},password={PASSWORD}")
        starts = cluster.generation(2)
        for start in starts.values():  # The user's code must not see the password.
            with open(f"/proc/{start.pid}/environ", "rb") as variables:
                assert b"HOLDFAST_ETCD" not in variables.read()
        cluster.start("guesses", env={**SECRETS, "HOLDFAST_ETCD_PASSWORD": "guess"})
        cluster.start("nobody")
        cluster.start("outside", conf="etcd_prefix=/others", env=SECRETS)
        assert "wrong user or password" in refusal_of(cluster, "guesses")
        assert "user and a password" in refusal_of(cluster, "nobody")
        assert "permission denied" in refusal_of(cluster, "outside")
        assert cluster.is_quiet()
        codes = cluster.finish(starts)
        assert (codes["a"], codes["b"]) == (0, 0)
        for agent in cluster.agents.values():
            assert PASSWORD not in agent.output()
