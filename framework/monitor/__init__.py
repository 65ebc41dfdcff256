"""What a run tells about itself: where its time went, and whether its replicas agree."""
