from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.numa.visible_devices import IF_SET, device_variables, visible_numbers


@pytest.mark.parametrize("visible", [None, "4,5,6", "GPU-a, GPU-b ,MIG-c"])
def test_each_worker_sees_one_entry_of_the_list(visible: str | None) -> None:
    inherited = {"A": "b"} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    expected = "0,1,2" if visible is None else visible
    for rank, device in enumerate(expected.split(",")):
        assert device_variables(inherited, rank) == {"CUDA_VISIBLE_DEVICES": device.strip()}


@pytest.mark.parametrize("name", IF_SET)
def test_variables_of_other_vendors_are_narrowed_only_if_set(name: str) -> None:
    shown = device_variables({name: "3,2,1,0"}, 1)
    assert shown == {"CUDA_VISIBLE_DEVICES": "1", name: "2"}
    assert name not in device_variables({name: ""}, 1)


def test_hip_and_cuda_variables_name_the_same_device() -> None:
    """HIP reads its own variable first, so that one decides if both are set."""
    assert device_variables({"HIP_VISIBLE_DEVICES": "6,7"}, 1) == {
        "HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "7",
    }  # fmt: skip
    both = {"HIP_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert device_variables(both, 0) == {"HIP_VISIBLE_DEVICES": "6", "CUDA_VISIBLE_DEVICES": "6"}
    empty = {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "4,5"}
    assert device_variables(empty, 1) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_rocr_visible_devices_is_not_changed() -> None:
    """HIP numbers the devices within it. If both were narrowed, most workers would have no device."""
    assert device_variables({"ROCR_VISIBLE_DEVICES": "4,5"}, 1) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_worker_without_a_device_is_an_error(name: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"^--virtual-local-rank: worker 2 has no device: {name}='0,1' names only 2$",
    ):
        device_variables({name: "0,1"}, 2)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("0,1,2", [0, 1, 2]),
        (" 2 ,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,0", [1]),
        ("1,7,0", [1]),  # CUDA reads no further.
        ("GPU-b,0", [1, 0]),
        ("GPU-a1", [0]),
        ("GPU-a", []),  # Ambiguous: two names begin with it.
        ("GPU-x,0", []),
    ],
)
def test_visible_devices_are_parsed_as_cuda_does(visible: str, numbers: list[int]) -> None:
    assert visible_numbers(visible, ["GPU-a1", "GPU-b1", "GPU-a2"]) == numbers
