"""Planned tables on a mesh: rows fetched from the devices that own them, gradients sent back, inside ``shard_map``."""
