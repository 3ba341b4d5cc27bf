"""Published texts name no folder of the machine."""

import pytest

from spherenet.training import TrainConfig
from spherenet.training.run_export import data_title, without_folders


@pytest.mark.parametrize(
    ("command", "public"),
    [
        ("spherenet train --data /home/ann/photos --output runs/a", "spherenet train --data photos --output runs/a"),
        ("spherenet train --data=/home/ann/my\\ photos", "spherenet train '--data=my photos'"),
        ("spherenet train --data ~/photos/", "spherenet train --data photos"),
        (r"spherenet train --data 'C:\Users\ann\photos'", "spherenet train --data photos"),
        ("spherenet train --data mnist5k --s 30", "spherenet train --data mnist5k --s 30"),
        ("spherenet 'unclosed", ""),
    ],
)
def test_commands(command, public):
    assert without_folders(command) == public


def test_data():
    assert data_title(TrainConfig(data="folder", data_dir="/home/ann/photos")) == "the image folder photos"
    assert data_title(TrainConfig(data="cifar10", data_dir="/home/ann")) == "cifar10"
