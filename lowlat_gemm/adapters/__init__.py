"""Adapters that install the dispatcher into a framework's modules; each imports its framework only when used."""
