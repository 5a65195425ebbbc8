"""Stress and measurement: what the commands `stress` and `bench` are made of.

`sizes` reads sizes, `payload` makes and checks data on the device, `rig` has the stream, events and graphs, `stress`
the long run; `floor` measures what hardware allows, `measure` the contenders, `timing` says how, `report` and `plot`
show it.
"""
