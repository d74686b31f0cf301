"""Layers: the parts that models are made of. Each lays its ops down once into a `ProgramBuilder` and holds no state of a step."""
