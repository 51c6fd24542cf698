"""Checks whose figures have bounds; each compares the device with the CPU or with another way to compute the same."""
