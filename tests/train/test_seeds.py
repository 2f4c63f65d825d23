"""train/seeds.py: seeds that depend on everything they are for."""

from torchstorm.train.seeds import derive_seed


def test_a_seed_depends_on_the_run_and_on_each_part_of_its_purpose() -> None:
    seeds = {
        derive_seed(0, "batch", 1, 2),
        derive_seed(1, "batch", 1, 2),
        derive_seed(0, "dropout", 1, 2),
        derive_seed(0, "batch", 2, 1),
        derive_seed(0, "batch", 12),
        derive_seed(0, "batch"),
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert derive_seed(7, "batch", 3) == 4906289534481965203
