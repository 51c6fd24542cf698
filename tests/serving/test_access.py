"""Tokens are never shown, and servers without one listen on the loopback address only."""

import pickle

import pytest

from rlhfkit.serving.access import AccessToken, ServerOptions, check_host, is_loopback

SECRET = "a-secret-of-24-characters"


def test_a_token_matches_its_own_header_only() -> None:
    token = AccessToken(SECRET)
    assert token.matches(token.header()["Authorization"])
    assert token.matches(f"bearer {SECRET}")
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        SECRET,
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
    ):
        assert not token.matches(wrong)
    assert not token.matches("Bearer ünïcode")


def test_comparing_takes_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: compared.append((one, other)) or one == other)
    assert AccessToken(SECRET).matches(f"Bearer {SECRET}")
    assert not AccessToken(SECRET).matches("Bearer other")
    assert compared == [(SECRET.encode(), SECRET.encode()), (b"other", SECRET.encode())]


def test_a_secret_in_a_variable_is_in_no_representation_and_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    token = AccessToken(variable="REWARD_TOKEN")
    assert token.header() == {"Authorization": f"Bearer {SECRET}"}
    assert SECRET not in f"{token!r} {token} {vars(token)}"
    assert SECRET.encode() not in pickle.dumps(token)
    assert "REWARD_TOKEN" in repr(token)
    given = AccessToken(SECRET)
    assert SECRET not in f"{given!r} {given}"
    assert pickle.loads(pickle.dumps(given)).matches(f"Bearer {SECRET}")


def test_what_is_no_token_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(ValueError, match="variable REWARD_TOKEN is not set"):
        AccessToken(variable="REWARD_TOKEN")
    for bad in ("", "two words", "with-line-end\n", "nön-ascii"):
        with pytest.raises(ValueError, match="visible ASCII") as caught:
            AccessToken(bad)
        assert not bad or bad not in str(caught.value)
    with pytest.raises(ValueError, match="either the token or the environment variable"):
        AccessToken()
    with pytest.raises(ValueError, match="either the token or the environment variable"):
        AccessToken(SECRET, variable="REWARD_TOKEN")
    assert AccessToken.optional() is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    check_host(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.example.org"])
def test_other_addresses_need_a_good_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValueError, match="without a token: others could reach the server"):
        check_host(host, None)
    with pytest.raises(ValueError, match="at least 16 characters, AccessToken"):
        check_host(host, AccessToken("short"))
    check_host(host, AccessToken(SECRET))


def test_options_of_a_server_show_no_secret_and_name_a_wrong_port() -> None:
    assert SECRET not in repr(ServerOptions(token=AccessToken(SECRET)))
    with pytest.raises(ValueError, match="port must be"):
        ServerOptions(port=2**16)
