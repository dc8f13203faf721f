"""The kit that drivers are made from: base classes around a few methods of their own, and the parts that these share."""
