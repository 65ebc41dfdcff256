"""Lists of hosts in their short form, against the list written out."""

from __future__ import annotations

import pytest

from framework.cluster.addresses import MOST, Cluster, expand, short, whole_number
from framework.errors import ConfigError


def refuse(what: str) -> ConfigError:
    return ConfigError(f"nodes: {what}")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("gpu[001-003,007],cpu5", "gpu001 gpu002 gpu003 gpu007 cpu5"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[5]", "n5"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
        ("[1-2]", "1 2"),
        ("w-[0-1].svc:2222, x:1", "w-0.svc:2222 w-1.svc:2222 x:1"),
        ("[::1]:2222,[2001:db8::2]:1", "[::1]:2222 [2001:db8::2]:1"),
    ],
)
def test_a_list_is_written_out(text: str, names: str) -> None:
    assert expand(text, refuse) == names.split()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu[1-3", "not closed"),
        ("gpu1-3]", "do not fit"),
        ("gpu[[1]]", "do not fit"),
        ("gpu[3-1]", "rising"),
        ("gpu[a-b]", "rising"),
        ("gpu[]", "rising"),
        ("gpu[1-]", "rising"),
        ("gpu[-1]", "rising"),
        ("gpu[1,,2]", "rising"),
        ("gpu[１]", "rising"),
        ("", "empty"),
        ("a,,b", "''"),
        ("a,", "empty"),
        ("n[0-9999999999]", str(MOST)),
        ("n[0-999]m[0-999]", str(MOST)),
        ("n[0-16383],m", str(MOST)),
        ("n[" + "9" * 5000 + "]", "rising"),
    ],
)
def test_what_cannot_be_written_out_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(text, refuse)
    assert said in str(caught.value) and len(str(caught.value)) < 500


def test_the_place_of_a_worker_on_its_machine() -> None:
    workers = ("a:1", "b:1", "a:2", "b:2", "a:3")
    assert [Cluster(workers, i).local_index for i in range(5)] == [0, 0, 1, 1, 2]
    assert Cluster().local_index == 0


def test_numbers_and_values_in_messages() -> None:
    assert [whole_number(t) for t in ("0", "07", "-1", "1.0", "", "²", "1" * 11)] == [
        0,
        7,
        None,
        None,
        None,
        None,
        None,
    ]
    assert short("a\nb") == r"'a\nb'"
    assert len(short("x" * 10_000)) < 220
