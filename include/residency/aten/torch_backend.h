#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/aten/device_layer.h"
#include "residency/aten/system_calls.h"
#include "residency/core/backend.h"
#include "residency/core/export.h"

namespace residency {

/// How files are read and written.
enum class FileEngine : std::uint8_t {
  kAutomatic,  ///< io_uring where the kernel allows it
  kBlocking,   ///< preadv and pwritev
};

struct TorchBackendOptions {
  /// The environment variable `RESIDENCY_FILE_ENGINE=blocking` overrules `kAutomatic`.
  FileEngine file_engine = FileEngine::kAutomatic;
  /// Null: the operating system's.
  std::shared_ptr<SystemCalls> system_calls = nullptr;
  /// Devices and page-locked memory, from `make_cuda_layer()`. Null: there are none.
  std::shared_ptr<DeviceLayer> devices = nullptr;
};

/// Tensors in pageable and page-locked host memory, on devices and in files.
///
/// Thread-safe as `Backend` asks. Copies between devices, and between a device and page-locked
/// memory, are enqueued on streams. All others are carried out by threads of the process, one for
/// files, one for the rest, one for what is ahead of need, each in the order of the calls (one more
/// enqueues copies ahead of need, and one ends what managers leave that nobody closed);
/// everything that can be known to fail beforehand (no space, no such file, a file that is
/// truncated or foreign) fails in `copy`, the rest through the fence. A value on disk cannot be
/// leased: `begin_access` is an `UnavailableError`. In a forked child files and devices are a
/// `ForkError` and host memory works as before.
///
/// One backend serves one manager.
class RESIDENCY_API TorchBackend final : public Backend {
 public:
  explicit TorchBackend(TorchBackendOptions options = {});
  ~TorchBackend() override;

  void open(ManagerId manager, const ManagerOptions& options) override;
  void attach(std::weak_ptr<Reclaimer> reclaimer) override;
  void close(bool wait) noexcept override;

  [[nodiscard]] std::string why_unavailable(Location location) const override;
  [[nodiscard]] bool is_lost(Location location) const override;
  void check_answers(Location location) override;
  void check_may_wait() const override;
  [[nodiscard]] Bytes occupied_bytes(const ValueSpec& spec, Location location) const override;
  [[nodiscard]] TransferPath path(Location from, Location to) const override;
  [[nodiscard]] bool reuses_in_device_order(Location location) const override;
  [[nodiscard]] bool is_shared(const Block& block) const override;
  [[nodiscard]] Bytes staging_bytes(Location from, Location to) const override;
  [[nodiscard]] std::optional<SegmentBytes> predict_segments(
      Location location, std::span<const MemoryStep> steps) const override;

  [[nodiscard]] std::optional<SpareBytes> spare_bytes(Location location,
                                                      const Growth& wanted) override;
  [[nodiscard]] CopyResult copy(const CopyRequest& request) override;
  [[nodiscard]] std::exception_ptr copy_all(std::span<const CopyRequest> requests,
                                            std::vector<CopyResult>& results) override;
  [[nodiscard]] BlockPtr reconstruct(Source& source, const ValueSpec& spec, Location at) override;
  void release(BlockPtr block, std::vector<FencePtr> after) noexcept override;
  [[nodiscard]] FencePtr watch_escape(const Block& block) override;

  void begin_access(Block& block, Access access, const std::optional<Stream>& stream,
                    std::span<const FencePtr> after, bool checksum) override;
  [[nodiscard]] std::optional<std::string> end_access(Block& block, Access access,
                                                      bool checksum) override;
  [[nodiscard]] std::unique_ptr<View> open_view(Block& block) override;
  [[nodiscard]] Stream current_stream(Location location) override;
  [[nodiscard]] FencePtr record_use(const Stream& stream) override;

 private:
  struct State;
  void check_available(Location location) const;

  std::unique_ptr<State> state_;
};

/// Whether files are read and written through io_uring here, unless told otherwise.
[[nodiscard]] RESIDENCY_API bool io_uring_is_usable() noexcept;

}  // namespace residency
