"""SASL mechanisms, against the examples of their RFCs and against peers that do not behave."""

import pytest

from ledgers.errors import UnauthorizedError
from ledgers.secret import Secret
from ledgers.wire.sasl import Credentials, DigestMd5, Mechanism, Plain

CHALLENGE = (
    b'realm="elwood.innosoft.com",nonce="OA6MG9tEQGm2hh",qop="auth",'
    b"algorithm=md5-sess,charset=utf-8"
)


def digest_md5(user: str = "chris", password: str = "secret") -> DigestMd5:
    """The example of RFC 2831, section 4."""
    return DigestMd5(
        Credentials(user=user, password=Secret(password)),
        service="imap",
        server="elwood.innosoft.com",
        make_nonce=lambda: "OA6MHXh6VqTrRk",
    )


def test_digest_md5_answers_as_in_its_rfc() -> None:
    mechanism = digest_md5()

    assert mechanism.first() == b""
    answer = mechanism.answer(CHALLENGE)
    assert answer is not None
    assert b"response=d388dad90d4bbd760a152321f2143af7" in answer
    assert b'digest-uri="imap/elwood.innosoft.com"' in answer
    assert mechanism.answer(b"rspauth=ea40f60335c427b5527b84dbabcdfffd") is None


@pytest.mark.parametrize(
    "proof",
    [
        pytest.param(b"rspauth=ea40f60335c427b5527b84dbabcdfffe", id="another digest"),
        pytest.param(b"", id="no proof: it lets everybody in"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b"rspauth", id="no value"),
        pytest.param(b"rspauth=ea40f60335c427b5527b84dbabcdfffd" + b"," * 2_048, id="too long"),
    ],
)
def test_a_server_that_does_not_know_the_password_is_refused(proof: bytes) -> None:
    mechanism = digest_md5()
    mechanism.answer(CHALLENGE)

    with pytest.raises(UnauthorizedError):
        mechanism.answer(proof)


@pytest.mark.parametrize(
    "challenge",
    [
        pytest.param(b"", id="empty, as of a ZooKeeper without SASL"),
        pytest.param(b'nonce="x",qop="auth-conf",algorithm=md5-sess', id="only with encryption"),
        pytest.param(b'nonce="x",qop="auth",algorithm=sha-256', id="another algorithm"),
        pytest.param(b'qop="auth",algorithm=md5-sess', id="no nonce"),
        pytest.param(b"rspauth=ea40f60335c427b5527b84dbabcdfffd", id="the proof at once"),
    ],
)
def test_a_server_without_the_mechanism_is_refused(challenge: bytes) -> None:
    with pytest.raises(UnauthorizedError, match="offers no DIGEST-MD5"):
        digest_md5().answer(challenge)


def test_special_characters_are_quoted() -> None:
    mechanism = digest_md5(user='a "b" \\c')

    answer = mechanism.answer(
        b'realm="one",realm="two",nonce="n\\"o",qop="auth,auth-int",algorithm=md5-sess'
    )

    assert answer is not None
    assert rb'username="a \"b\" \\c",realm="one",nonce="n\"o"' in answer


def test_plain_sends_user_and_password() -> None:
    mechanism: Mechanism = Plain(Credentials(user="tim", password=Secret("tanstaaftanstaaf")))

    assert mechanism.first() == b"\0tim\0tanstaaftanstaaf"
    assert mechanism.answer(b"") is None
