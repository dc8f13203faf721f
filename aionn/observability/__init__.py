"""The means to observe a running application: log tags, and sections of work for traces."""
