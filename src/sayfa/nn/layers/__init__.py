"""Layers: the parts that models are made of. Each lays its ops down once, at load, and holds no state of a step."""
