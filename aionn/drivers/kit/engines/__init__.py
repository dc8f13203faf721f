"""The common part of drivers around engines: values known beforehand, support, prepared models, bound arguments."""
