"""Batches on their way to a step: read, packed, cut into the devices' parts, with their rows from host memory."""
