"""What can be seen of a running application: log tags, and sections of work for traces."""
