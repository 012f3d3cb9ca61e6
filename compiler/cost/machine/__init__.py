"""The machine a plan is made for: devices, links, and the files that describe them."""
